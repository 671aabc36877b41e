"""An agent whose transcript grows with every tool call.

    python tutorials/frontend/agent_loop.py http://localhost:30000

Each turn sends the whole transcript again. The prefix tree has all of it that was a prompt before,
so a turn computes only what is new, and is bounded by its own budget while it thinks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import sglang as sgl

from sglang_beacon.srt.frontend import PolicyEndpoint

RULES = (
    "You keep a lighthouse. Each morning you look at one instrument, and you write one line into "
    "the log. The instruments are: barometer, lamp, calendar.\n"
)
TOOLS: Mapping[str, Callable[[int], str]] = {
    "barometer": lambda day: f"{1000 + 3 * (day * 7 % 11)} hPa",
    "lamp": lambda day: "clean" if day % 3 else "sooty",
    "calendar": lambda day: f"day {day}",
}


@sgl.function
def keep_the_log(s: Any, days: int, tokens: int) -> None:
    """One tool call and one line a day; ``s.turns`` says what each turn cost."""
    s += RULES
    s.turns = []
    for day in range(1, days + 1):
        s += f"Day {day}. I look at the "
        s += sgl.select(f"tool_{day}", choices=list(TOOLS))
        s += f": {TOOLS[s[f'tool_{day}']](day)}. I write: "
        s += sgl.gen(f"line_{day}", max_tokens=tokens, stop="\n", temperature=0)
        s += "\n"
        meta = s.get_meta_info(f"line_{day}")
        s.turns.append(
            {
                "tool": s[f"tool_{day}"],
                "prompt": meta["prompt_tokens"],
                "cached": meta["cached_tokens"],
                "held": meta["kv_policy"]["held_tokens"],
            }
        )


def main() -> None:
    """Keep the log for a few days."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--budget", type=int, default=256)
    args = parser.parse_args()
    state = keep_the_log.run(
        days=args.days, tokens=args.tokens, backend=PolicyEndpoint(args.url, kv_budget=args.budget)
    )
    print(state.text())
    for turn in state.turns:
        print(turn)


if __name__ == "__main__":
    main()
