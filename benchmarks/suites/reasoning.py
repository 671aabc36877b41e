"""Full-size reasoning benchmarks, asked by `sgl-eval` of one server per method, as users start it.

    pipx install sgl-eval
    python -m benchmarks.quality --suite reasoning --model Qwen/Qwen3-4B --budgets 2048 1024

AIME 2024 and 2025, MATH-500 and GPQA-Diamond with the paper's sampling: temperature 0.6, top-p
0.95, 32,768 tokens, eight answers to an AIME item and four to the others. Questions and graders are
`sgl-eval`'s; it downloads what it needs. MATH-500 is read from a file, since `sgl-eval` does not
have it; LiveCodeBench runs generated programs and is in neither.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suites.base import Outcome, Suite, Task
from sglang_beacon.lab.serving import Server


class Benchmark(NamedTuple):
    """A benchmark of `sgl-eval`: its name, answers per item, and a file of other questions."""

    runs: str
    repeats: int
    questions: Path | None = None


BENCHMARKS = {
    "aime24": Benchmark("aime24", 8),
    "aime25": Benchmark("aime25", 8),
    "gpqa": Benchmark("gpqa", 4),
}

# Accuracy [%] by benchmark, model and budget, from the paper's tables and text; BeaconKV with 16
# beacons and 16 recent queries, as here by default.
PUBLISHED: dict[tuple[str, str, int], dict[str, float]] = {
    ("aime24", "Qwen3-14B", 1024): {"beacon": 57.92, "initial_recent": 23.75},
    ("math500", "Qwen3-14B", 1024): {"beacon": 84.20, "initial_recent": 67.30},
    ("gpqa", "Qwen3-14B", 1024): {"beacon": 61.11, "initial_recent": 60.23},
    ("aime24", "Qwen3-4B", 2048): {"beacon": 64.6, "rpc": 51.3},
    ("aime24", "DeepSeek-R1-Distill-Qwen-7B", 1024): {"beacon": 39.17, "initial_recent": 20.42},
}


@dataclass
class ReasoningTask(Task):
    """One benchmark; ``accuracy`` is each item's share of right answers.

    Raises
    ------
    RuntimeError
        When `sgl-eval` fails; the message ends with what it printed.
    """

    name: str
    benchmark: Benchmark
    command: str = "sgl-eval"
    new_tokens: int = 32_768
    examples: int | None = None
    main = "accuracy"

    @property
    def parameters(self) -> Mapping[str, Any]:
        questions = self.benchmark.questions
        return {"name": self.name, "questions": questions.name if questions else "sgl-eval"}

    @property
    def items(self) -> Mapping[str, Any]:
        return {"count": self.examples, "answers": self.benchmark.repeats, "seed": 0}

    @property
    def context(self) -> int:
        return self.new_tokens

    @property
    def decoding(self) -> Mapping[str, Any]:
        return {"temperature": 0.6, "top_p": 0.95, "new_tokens": self.new_tokens}

    def run(self, server: Server, custom_params: Mapping[str, Any]) -> Outcome:
        """Ask a server that was started with the method."""
        before = _evicted(server)
        with tempfile.TemporaryDirectory() as directory:
            arguments = [
                self.command, "run", self.benchmark.runs, "--base-url", f"{server.url}/v1",
                "--temperature", "0.6", "--top-p", "0.95", "--max-tokens", str(self.new_tokens),
                "--n-repeats", str(self.benchmark.repeats), "--seed", "0", "--out-dir", directory,
            ]  # fmt: skip
            if self.benchmark.questions:
                arguments += ["--from-dataset", str(self.benchmark.questions)]
            if self.examples:
                arguments += ["--num-examples", str(self.examples)]
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"sgl-eval failed:\n{(done.stdout + done.stderr)[-2000:]}")
            answers = [
                json.loads(line)
                for path in sorted(Path(directory).rglob("output-rs*.jsonl"))
                for line in path.read_text(encoding="utf-8").splitlines()
            ]
        right: dict[str, list[float]] = {}
        for answer in answers:
            right.setdefault(str(answer["id"]), []).append(float(answer["symbolic_correct"]))
        cut = [answer.get("finish_reason") == "length" for answer in answers]
        after = _evicted(server)
        evictions, tokens = ((b - a) / len(answers) for a, b in zip(before, after, strict=True))
        return Outcome(
            {"accuracy": [sum(each) / len(each) for _, each in sorted(right.items())]},
            totals={"evictions": evictions, "evicted_tokens": tokens},
            truncated=sum(cut) / len(cut),
        )


def suite(
    model: str, command: str, new_tokens: int, examples: int | None, math500: Path | None
) -> Suite:
    """All benchmarks for one model, a directory or a name in the hub; MATH-500 only if given."""
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(model))
    benchmarks = dict(BENCHMARKS)
    if math500 is not None:
        benchmarks["math500"] = Benchmark("aime24", 4, math500)
    tasks = [
        ReasoningTask(name, benchmark, command, new_tokens, examples)
        for name, benchmark in benchmarks.items()
    ]
    return Suite("reasoning", directory, tasks, (2048, 1024, 512), server_each=True)


def beside_published(model: str, task: str, budget: int, ours: Mapping[str, float]) -> str:
    """A table of our accuracies [%] beside the published ones."""
    published = PUBLISHED.get((task, model.rpartition("/")[2], budget), {})
    lines = [f"{task}, {model}, budget {budget}", f"{'method':18s}{'ours':>8s}{'published':>11s}"]
    for name in (*ours, *(name for name in published if name not in ours)):
        mine = f"{100 * ours[name]:.1f}" if name in ours else "-"
        theirs = f"{published[name]:.1f}" if name in published else "-"
        lines.append(f"{name:18s}{mine:>8s}{theirs:>11s}")
    return "\n".join(lines)


def _evicted(server: Server) -> tuple[int, int]:
    """Evictions and evicted tokens since the server's start."""
    counters = server.info()["internal_states"][0].get("kv_policy", {}).get("counters", {})
    return counters.get("evictions", 0), counters.get("evicted_tokens", 0)
