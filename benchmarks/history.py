"""Long random histories of requests: come, aborted, retracted, flushed; all invariants, every step.

    python -m benchmarks.history --steps 20000 --page-size 1 --seed 7

Runs ``tests/server/test_any_history.py`` with more steps of the scheduler, and prints the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

import pytest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    args = parser.parse_args()
    os.environ.update(
        HISTORY_STEPS=str(args.steps), HISTORY_PAGE=str(args.page_size), HISTORY_SEED=str(args.seed)
    )
    # At least one step in 10 ms, with checks on.
    timeout = f"--timeout={600 + args.steps / 10:.0f}"
    sys.exit(pytest.main(["-s", timeout, "tests/server/test_any_history.py"]))


if __name__ == "__main__":
    main()
