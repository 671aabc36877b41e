"""Whether a model of `revisit_chain` is fit for comparing policies.

``python -m sglang_beacon.lab.revisit_acceptance TASK`` writes ``acceptance.json`` beside the task's
checkpoint. A model is fit if it is exact with everything kept, and still with nothing but the facts
that are true and a window: then whoever forgets a fact fails for that reason alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_beacon.lab.revisit_chain import TASKS, Chain, Grade, RevisitTask, grade, sizes

BATCH = 25
# What every policy keeps: the first tokens, and the newest ones.
PREFIX, WINDOW = 4, 16


def visible(chain: Chain, window: int | None, others: torch.Tensor | None = None) -> torch.Tensor:
    """What each token of a chain sees, bool [T, T]; see `answers`. ``others`` [T] are seen too."""
    place = torch.arange(len(chain.tokens))
    seen = place <= place[:, None]
    if window is not None:
        near = place[:, None] - place < window
        near[:, list(chain.facts)] |= place[:, None] < torch.tensor(chain.until)
        near[:, :PREFIX] = True
        if others is not None:
            near |= others
        near[: chain.first_step] = True
        seen &= near
    return seen


@torch.no_grad()
def answers(model: PreTrainedModel, chains: Sequence[Chain], window: int | None) -> list[Grade]:
    """How far a greedy continuation of each chain is right.

    Greedy decoding is right as long as every next token is predicted from the right ones before, so
    one forward tells.

    Parameters
    ----------
    model : PreTrainedModel
    chains : sequence of Chain
        Of one length.
    window : int or None
        From the first step on, a token sees the facts while they are true, the first `PREFIX`
        tokens, which no policy evicts, and the newest `window` tokens; None lets it see everything.
    """
    grades = []
    for begin in range(0, len(chains), BATCH):
        batch = chains[begin : begin + BATCH]
        tokens = torch.tensor([chain.tokens for chain in batch])
        mask = torch.stack([visible(chain, window) for chain in batch])[:, None]
        said = model(input_ids=tokens, attention_mask=mask).logits.argmax(-1)
        for chain, row in zip(batch, said.tolist(), strict=True):
            grades.append(grade(chain, row[chain.n_prompt - 1 : -1]))
    return grades


def accept(model: PreTrainedModel, task: RevisitTask, count: int, window: int) -> dict[str, Any]:
    """Shares of exact chains with everything kept, and with the facts and a window."""
    draw = random.Random(400)
    chains = [task.sample(draw) for _ in range(count)]
    full, oracle = answers(model, chains, None), answers(model, chains, window)
    return {
        **asdict(task),
        "chains": count,
        "full_exact": sum(each.exact for each in full) / count,
        # A fact is a key and its value.
        "oracle_budget": 2 * task.n_keys + PREFIX + window,
        "oracle_exact": sum(each.exact for each in oracle) / count,
        "oracle_lost_revisits": sum(bool(each.lost_revisit) for each in oracle),
        "window": window,
    }


def main() -> None:
    """Check the sizes that the benchmarks use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--checkpoint", type=Path, help="instead of the shipped one")
    parser.add_argument("--chains", type=int, default=400)
    args = parser.parse_args()
    kind = TASKS[args.task]
    checkpoint = args.checkpoint or kind.checkpoint
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    results = []
    # Fewer of the other sizes.
    for task, part in zip(sizes(kind).values(), (1, 4, 4, 8), strict=True):
        results.append(accept(model, task, args.chains // part, WINDOW))
        print(results[-1], flush=True)
    (checkpoint / "acceptance.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
