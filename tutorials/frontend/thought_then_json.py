"""A long thought under a budget, then an answer that is JSON whatever was thought.

    python tutorials/frontend/thought_then_json.py http://localhost:30000

The grammar bounds what is said, the budget what is held; neither knows of the other.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import sglang as sgl

from sglang_beacon.srt.frontend import PolicyEndpoint

ANSWER = r'\{"animal": "[a-z]{3,12}", "legs": [0-9]\}'


@sgl.function
def think_then_answer(s: Any, question: str, tokens: int) -> dict[str, Any]:
    """Think freely, then fill in the form; returns the parsed answer."""
    s += f"Question: {question}\nLet me think about it at length.\n"
    s += sgl.gen("thought", max_tokens=tokens, temperature=0, ignore_eos=True)
    s += "\nSo the answer, as JSON, is: " + sgl.gen("answer", max_tokens=60, regex=ANSWER)
    s.policy = s.get_meta_info("thought")["kv_policy"]
    answer: dict[str, Any] = json.loads(s["answer"])
    return answer


def main() -> None:
    """Ask one question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--question", default="Which animal spins a web, and how many legs has it?")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--budget", type=int, default=192)
    args = parser.parse_args()
    state = think_then_answer.run(
        question=args.question,
        tokens=args.tokens,
        backend=PolicyEndpoint(args.url, kv_budget=args.budget),
    )
    print(state.ret_value)
    print(
        f"thought: {state.policy['logical_tokens']} tokens seen, "
        f"{state.policy['held_tokens']} held, {state.policy['evictions']} evictions"
    )


if __name__ == "__main__":
    main()
