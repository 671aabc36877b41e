"""How the shipped models of `revisit_chain` were trained: each in about an hour on two CPU cores.

``python -m sglang_beacon.lab.revisit_training OUT`` writes the checkpoint, its tokenizer and
``training.jsonl``. What matters: from few keys and short chains to many and long ones; full weight
on facts and lookups; and fillers that need no memory, or the model learns to look far back for
them.

RevisitChain's came from eight runs, each going on from the one before (``run`` in its
``training.jsonl``): it was stopped where a curriculum was too steep. VariableTracking's goes on
from that one, in three: ``--tasks variable_tracking --start RUN --from-stage 2`` until nearly all
is right, then ``--from-stage 7``, and once more from 6.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_beacon.lab.revisit_acceptance import WINDOW, visible
from sglang_beacon.lab.revisit_chain import (
    STEP_TOKENS,
    TASKS,
    VOCABULARY,
    Chain,
    RevisitChain,
    save_tokenizer,
)

LOG_EVERY = 50


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes
    ----------
    n_keys, n_steps
        Keys to draw from and the steps of a chain.
    max_updates
        Updates until the next stage at the latest.
    batch_tokens
        Tokens of one update, about.
    finish
        Go on as soon as all but everything is right twice in a row.
    hidden
        Share of updates in which the steps see the first tokens, the facts, a window, and at most
        a part of the rest: a model that may look anywhere learns the next addend from far back.
    """

    n_keys: tuple[int, ...]
    n_steps: int
    max_updates: int
    batch_tokens: int = 2048
    finish: bool = True
    hidden: float = 0.0


CURRICULUM = (
    Stage((4,), 6, 2000),
    Stage((8,), 8, 2000),
    Stage((6, 8, 10, 12), 12, 2000),
    Stage((8, 12, 16), 16, 2000),
    Stage((8, 16, 20, 24), 24, 2000, 3072),
    Stage((8, 16, 24), 72, 600, 5120),
    Stage((8, 16, 24), 200, 300, 6144, finish=False),
    Stage((8, 16, 24), 24, 250, 3072, finish=False, hidden=0.7),
    Stage((8, 16, 24), 200, 80, 6144, finish=False, hidden=0.5),
    Stage((8, 16, 24), 72, 150, 5120, finish=False, hidden=0.8),
    Stage((8, 16, 24), 200, 100, 6144, finish=False, hidden=0.5),
)


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3: 4 layers, width 128, 4:2 heads of size 64, 0.8 M parameters."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            rope_theta=10_000.0,
            bos_token_id=VOCABULARY.index("<s>"),
            eos_token_id=VOCABULARY.index("</s>"),
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


# What a token is for: of the prompt, which cannot be predicted, or of the rest, with its weight.
PROMPT, FACT, REVISIT, NEXT_KEY, REST = range(5)
WEIGHTS = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.2])


def pack(chains: Sequence[Chain]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack chains of one length; returns tokens and the kind of each, ``[chains, length]``."""
    tokens = torch.tensor([chain.tokens for chain in chains])
    kinds = torch.zeros_like(tokens)
    for row, chain in zip(kinds, chains, strict=True):
        row[chain.n_prompt :] = REST
        row[[fact for fact in chain.facts if fact >= chain.n_prompt]] = FACT
        revisits = torch.tensor(chain.revisits)
        row[revisits] = REVISIT
        row[revisits[1:] - 1] = NEXT_KEY
    return tokens, kinds


def some(chain: Chain, draw: random.Random) -> torch.Tensor:
    """Any part of a chain's tokens, as a policy may leave them, bool [T].

    Of each place within a step its own share, in a random stretch: policies favour kinds of tokens
    and old ones, and a model that has only seen even thinning finds an old addend as good as new.
    """
    length = len(chain.tokens)
    shares = torch.tensor([draw.choice([0.0, draw.random(), 1.0]) for _ in range(STEP_TOKENS)])
    begin, end = sorted(draw.randrange(length + 1) for _ in range(2))
    place = torch.arange(length)
    within = (begin <= place) & (place < end)
    return within & (torch.rand(length) < shares[(place - chain.first_step) % STEP_TOKENS])


def train(
    model: Qwen3ForCausalLM,
    tasks: Sequence[str],
    curriculum: Sequence[Stage],
    seed: int,
    out: Path,
    peak_rate: float = 1.2e-3,
) -> None:
    """Train `model` in place on a mixture of tasks; writes it and a log of its way to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "training.jsonl"
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    total = sum(stage.max_updates for stage in curriculum)
    start, done = time.monotonic(), 0
    for number, stage in enumerate(curriculum):
        solved = 0
        for _ in range(stage.max_updates):
            task = TASKS[draw.choice(tasks)](draw.choice(stage.n_keys), stage.n_steps)
            chains = [task.sample(draw)]
            rows = max(4, stage.batch_tokens // len(chains[0].tokens))
            chains += [task.sample(draw) for _ in range(rows - 1)]
            tokens, kinds = pack(chains)
            warm, past = min(1.0, (done + 1) / 100), min(1.0, done / total)
            rate = peak_rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * past)))
            for group in optimizer.param_groups:
                group["lr"] = rate

            mask = None
            if draw.random() < stage.hidden:
                others = some(chains[0], draw)
                mask = torch.stack([visible(chain, WINDOW, others) for chain in chains])[:, None]
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
            losses = functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            ).view(len(tokens), -1)
            kinds = kinds[:, 1:]
            weights = WEIGHTS[kinds]
            loss = (losses * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1

            if done % LOG_EVERY == 0:
                right = logits.argmax(-1) == tokens[:, 1:]
                share = {
                    name: round(right[kinds == kind].float().mean().item(), 4)
                    for kind, name in (
                        (FACT, "facts"),
                        (REVISIT, "revisits"),
                        (NEXT_KEY, "keys"),
                        (REST, "rest"),
                    )
                    if (kinds == kind).any()
                }
                line = {
                    "update": done, "stage": number, "task": task.name, **asdict(task),
                    "loss": round(loss.item(), 5), **share,
                    "seconds": round(time.monotonic() - start),
                }  # fmt: skip
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                solved = solved + 1 if min(share.values()) > 0.99 else 0
                if stage.finish and solved == 2:
                    break
        save(model, out)


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write model and tokenizer in half precision, which is how they ship."""
    model.half().save_pretrained(directory)
    model.float()
    save_tokenizer(directory)


def main() -> None:
    """Train from scratch, or go on from a checkpoint with another mixture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[RevisitChain.name])
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--from-stage", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=1.2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.start:
        model = Qwen3ForCausalLM.from_pretrained(options.start).float().train()
    else:
        model = new_model(options.seed)
    train(
        model,
        options.tasks,
        CURRICULUM[options.from_stage :],
        options.seed,
        options.out,
        options.peak_rate,
    )


if __name__ == "__main__":
    main()
