"""Several thoughts about one question, and the answer that most of them reach.

    python tutorials/frontend/self_consistency.py http://localhost:30000

The preamble is held once in the prefix tree, whoever thinks about it; each thought is bounded by
its own budget.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import Any

import sglang as sgl

from sglang_beacon.srt.frontend import PolicyEndpoint

PREAMBLE = (
    "You are a careful teacher. You solve a problem step by step, you write down every number that "
    "you will need again, and you end with the line 'Answer:' and the number.\n"
)


@sgl.function
def think_together(s: Any, question: str, thoughts: int, tokens: int) -> Counter[str]:
    """Fork over the question; counts the answers."""
    s += f"{PREAMBLE}Problem: {question}\nSolution:"
    # A fork shares what the tree has by then.
    s.sync()
    forks = s.fork(thoughts)
    forks += sgl.gen("thought", max_tokens=tokens, temperature=0.6, top_p=0.95)
    answers = [last_number(fork["thought"]) for fork in forks]
    s.held = [fork.get_meta_info("thought")["kv_policy"]["held_tokens"] for fork in forks]
    return Counter(answer for answer in answers if answer is not None)


def last_number(text: str) -> str | None:
    """The last number of a text, as it stands there."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return found[-1] if found else None


def main() -> None:
    """Ask one question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--question", default="A box holds 12 eggs. How many eggs are in 7 boxes?")
    parser.add_argument("--thoughts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--budget", type=int, default=256)
    args = parser.parse_args()
    backend = PolicyEndpoint(args.url, kv_budget=args.budget)
    state = think_together.run(
        question=args.question, thoughts=args.thoughts, tokens=args.tokens, backend=backend
    )
    for answer, votes in state.ret_value.most_common():
        print(f"{votes} of {args.thoughts}: {answer}")
    print(f"tokens held by each thought: {state.held}")


if __name__ == "__main__":
    main()
