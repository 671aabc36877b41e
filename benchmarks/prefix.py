"""Shared prefixes under memory pressure, side by side in one run.

    python -m benchmarks.prefix modes      # slots that requests over one long prompt take
    python -m benchmarks.prefix hits       # what the prefix tree still has when it is asked again
    python -m benchmarks.prefix pressure   # throughput, against SGLang with and without room
    python -m benchmarks.prefix core       # what the Python tree costs beside the Rust one

The tiny random model is meant (``--model random --threads 1``): what is measured is memory and
scheduling. Where `modes` counts slots, the tree's evictable ones count as free.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Row, Watch, compare, parse, throughput
from sglang_beacon.lab.random_model import VOCABULARY
from sglang_beacon.lab.random_model import random_prompt as prompt
from sglang_beacon.lab.serving import Server

Job = dict[str, Any]


def modes(args: argparse.Namespace) -> None:
    """1, 4 and 16 requests of 700 tokens over one prompt of 2,000, budget 512."""
    shared, tokens, budget, slots = 2000, 700, 512, 16_384

    def measure(server: Server, seed: int) -> Row:
        row = {}
        for count in (1, 4, 16):
            prefix = prompt(shared, seed)
            server.flush()
            server.generate(prefix, 1)
            jobs = [
                {"input_ids": prefix + prompt(8, seed + n), "max_new_tokens": tokens}
                for n in range(count)
            ]
            with Watch(server, interval_s=0.05) as watch:
                server.generate_all(jobs)
            row[f"peak_slots_of_{count}"] = watch.row["peak_slots"]
        return row

    common = ["--max-total-tokens", str(slots), "--kv-budget", str(budget)]
    servers = {"none": [*common, "--kv-policy", "none"]}
    for mode in ("pin", "copy", "auto"):
        config = f'{{"shared_prefix": "{mode}"}}'
        servers[mode] = [*common, "--kv-policy", "beacon", "--kv-policy-config", config]
    setup = {"prompt": shared, "generated": tokens, "budget": budget}
    compare(args, "prefix", "modes", setup, servers, measure)


def hits(args: argparse.Namespace) -> None:
    """Share of prompt tokens found in a tree of 6,000 slots, by load and eviction strategy."""
    slots = 6000

    def measure(server: Server, seed: int) -> Row:
        row = {}
        for name, load in LOADS.items():
            server.flush()
            row[f"hit_rate_{name}"] = hit_rate(server, load(seed))
        return row

    common = ["--max-total-tokens", str(slots), "--kv-policy", "none"]
    servers = {
        policy: [*common, "--radix-eviction-policy", policy]
        for policy in ("lru", "lfu", "shared-prefix")
    }
    compare(args, "prefix", "hits", {"slots": slots}, servers, measure)


def pressure(args: argparse.Namespace) -> None:
    """24 requests of 600 tokens over 3 prompts of 400; 3,000 slots, or all that SGLang wants."""
    requests, tokens, budget, slots = 24, 600, 256, 3000

    def measure(server: Server, seed: int) -> Row:
        jobs = [
            {
                "input_ids": prompt(400, seed + n % 3) + prompt(8, seed + 100 + n),
                "max_new_tokens": tokens,
            }
            for n in range(requests)
        ]
        return throughput(server, jobs)

    small, budgeted = ["--max-total-tokens", str(slots)], ["--kv-budget", str(budget)]
    servers = {
        "none": [*small, "--kv-policy", "none"],
        "none with room": ["--max-total-tokens", "65536", "--kv-policy", "none"],
        "beacon": [*small, *budgeted, "--kv-policy", "beacon"],
    }
    setup = {"requests": requests, "generated": tokens, "slots": slots, "budget": budget}
    compare(args, "prefix", "pressure", setup, servers, measure)


def core(args: argparse.Namespace) -> None:
    """Requests of one token over many shared prompts: the tree is all there is to do."""

    def measure(server: Server, seed: int) -> Row:
        jobs = agents(seed)
        begin = time.perf_counter()
        run(server, jobs)
        return {"requests_per_s": len(jobs) / (time.perf_counter() - begin)}

    common = ["--max-total-tokens", "6000", "--kv-policy", "none"]
    servers = {"rust": common, "python": [*common, "--radix-eviction-policy", "shared-prefix"]}
    compare(args, "prefix", "core", {"slots": 6000}, servers, measure)


STUDIES: dict[str, Callable[[argparse.Namespace], None]] = {
    "modes": modes,
    "hits": hits,
    "pressure": pressure,
    "core": core,
}


def generated_shared_prefix(seed: int) -> list[Job]:
    """The load of that name of ``sglang.bench_serving``: 16 prompts of 600 tokens, 12 each."""
    return _shared_prefix(seed, group_distribution="uniform")


def generated_shared_prefix_zipf(seed: int) -> list[Job]:
    """The same with some prompts much more popular than others."""
    return _shared_prefix(seed, group_distribution="zipf", zipf_alpha=1.2)


def agents(seed: int) -> list[Job]:
    """Agents that branch: 4 preambles, each turn of a task tries 3 continuations and keeps one.

    In between, long documents come once and never again.
    """
    draw = random.Random(seed)
    preambles = [prompt(500, seed + n) for n in range(4)]
    tasks = [list(draw.choice(preambles)) for _ in range(12)]
    jobs = []
    for turn in range(60):
        task = draw.randrange(len(tasks))
        branches = [tasks[task] + prompt(40, seed + 1000 + 3 * turn + n) for n in range(3)]
        jobs += [{"input_ids": branch} for branch in branches]
        tasks[task] = draw.choice(branches)
        if turn % 2:
            jobs.append({"input_ids": prompt(800, seed + 9000 + turn)})
        if len(tasks[task]) > 900:
            tasks[task] = list(draw.choice(preambles))
    return jobs


def trends(seed: int) -> list[Job]:
    """Some prompts are much more popular than others, and every 100 requests it is others."""
    draw = random.Random(seed)
    prompts = [prompt(600, seed + n) for n in range(40)]
    weights = [rank**-1.2 for rank in range(1, 17)]
    popular = (draw.choices(prompts[8 * (n // 100) :][:16], weights)[0] for n in range(400))
    return [{"input_ids": head + prompt(40, seed + 500 + n)} for n, head in enumerate(popular)]


LOADS = {
    "generated_shared_prefix": generated_shared_prefix,
    "generated_shared_prefix_zipf": generated_shared_prefix_zipf,
    "agents": agents,
    "trends": trends,
}


def hit_rate(server: Server, jobs: Sequence[Job]) -> float:
    """Share of all prompt tokens that were found in the tree."""
    found = sum(reply["meta_info"]["cached_tokens"] for reply in run(server, jobs))
    return found / sum(len(job["input_ids"]) for job in jobs)


def run(server: Server, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One token for each job, one after the other, so that all servers see the same order."""
    return [server.generate(job["input_ids"], 1) for job in jobs]


class _Vocabulary:
    """As much of a tokenizer as the load generator needs."""

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(2, VOCABULARY)}


def _shared_prefix(seed: int, **distribution: Any) -> list[Job]:
    from sglang.benchmark.datasets.generated_shared_prefix import (
        sample_generated_shared_prefix_requests,
    )

    random.seed(seed)
    rows = sample_generated_shared_prefix_requests(
        num_groups=16,
        prompts_per_group=12,
        system_prompt_len=600,
        question_len=40,
        output_len=1,
        # Not exactly 1, which would read and write a cache in the home directory.
        range_ratio=0.99,
        tokenizer=_Vocabulary(),
        seed=seed,
        input_ids=True,
        **distribution,
    )
    return [{"input_ids": row.prompt} for row in rows]


def main() -> None:
    """Run one study."""
    args = parse(__doc__, tuple(STUDIES), rounds=5)
    STUDIES[args.study](args)


if __name__ == "__main__":
    main()
