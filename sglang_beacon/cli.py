"""The ``sglang-beacon`` command: plan a deployment, try it, and look into it.

Each command imports what it needs when it runs, so that ``plan`` works without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from sglang_beacon import capacity
from sglang_beacon.capacity import MemoryEstimate, ModelShape

_FAILED = 2
_INTERRUPTED = 130
_UNREACHABLE = 1


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(_FAILED, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if nobody answers, 2 after an error."""
    args = _build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("sglang-beacon: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sglang-beacon", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="memory and largest batch with and without a KV budget")
    plan.add_argument(
        "--model", required=True, metavar="MODEL", help="directory, config.json or hub name"
    )
    plan.add_argument("--gpu-memory", required=True, metavar="SIZE", help="per GPU: 80GB, 80GiB")
    plan.add_argument("--kv-budget", required=True, type=int, help="tokens kept per request")
    plan.add_argument("--generate", required=True, type=int, help="generated tokens per request")
    plan.add_argument("--prompt", type=int, default=0, help="prompt tokens per request (0)")
    plan.add_argument("--batch", type=int, help="requests (default: most that fit without policy)")
    plan.add_argument("--page-size", type=int, default=1, help="tokens per KV page (1)")
    plan.add_argument("--tp", type=int, default=1, help="tensor parallel size (1)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=_plan)

    demo = commands.add_parser("demo-model", help="fetch and convert a small real model")
    demo.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="where to put it")
    demo.set_defaults(run=_demo_model)

    watch = commands.add_parser("watch", help="what a running server's requests hold, live")
    watch.add_argument("url", metavar="URL", help="of the server: http://localhost:30000")
    watch.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    watch.add_argument("--once", action="store_true", help="show it once and leave")
    watch.set_defaults(run=_watch)

    report = commands.add_parser("report", help="draw a request's trace as one HTML page")
    report.add_argument("trace", type=Path, metavar="TRACE.json")
    report.add_argument("--out", type=Path, metavar="PAGE.html", help="(beside the trace)")
    report.set_defaults(run=_report)

    doctor = commands.add_parser("doctor", help="check that this installation can serve")
    doctor.set_defaults(run=_doctor)
    return parser


def _fail(sentence: str, code: int = _FAILED) -> int:
    print(f"sglang-beacon: {sentence}", file=sys.stderr)
    return code


def _doctor(args: argparse.Namespace) -> int:
    from sglang_beacon.plugin import ALL_HOOKS
    from sglang_beacon.srt import doctor

    return doctor.main(ALL_HOOKS)


def _demo_model(args: argparse.Namespace) -> int:
    from sglang_beacon.lab import demo_model

    try:
        directory = demo_model.ensure(args.directory)
    except demo_model.DemoModelError as error:
        return _fail(str(error))
    print(directory)
    return 0


def _watch(args: argparse.Namespace) -> int:
    from sglang_beacon.lab.watch import WatchError, watch

    try:
        watch(args.url, args.every, times=1 if args.once else None)
    except WatchError as error:
        return _fail(str(error), _UNREACHABLE)
    return 0


def _report(args: argparse.Namespace) -> int:
    from sglang_beacon.lab import report

    out = args.out or args.trace.with_suffix(".html")
    out.write_text(report.page(report.read(args.trace)), encoding="utf-8")
    print(out)
    return 0


def _plan(args: argparse.Namespace) -> int:
    plan = Plan(
        model=args.model,
        shape=ModelShape.from_config(_read_config(args.model)).shard(args.tp),
        tp=args.tp,
        gpu_memory_bytes=capacity.parse_size(args.gpu_memory),
        prompt=args.prompt,
        generate=args.generate,
        kv_budget=args.kv_budget,
        page_size=args.page_size,
        batch=args.batch,
    )
    print(json.dumps(plan.as_dict()) if args.json else "\n".join(plan.lines()))
    return 0


def _read_config(model: str) -> Mapping[str, Any]:
    """Read a directory, a ``config.json`` or the config of a model that transformers knows."""
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() or path.name == "config.json":
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the model config {path} ({error})") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} does not hold a model config")
        return config
    return _hub_config(model)


def _hub_config(model: str) -> Mapping[str, Any]:
    try:
        from transformers import AutoConfig

        config: dict[str, Any] = AutoConfig.from_pretrained(model).to_dict()
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"cannot find the model {model!r}: give a directory or a config.json, "
            "or a hub name that transformers can load"
        ) from error
    return config


@dataclass(frozen=True)
class Plan:
    """What ``sglang-beacon plan`` prints: one GPU with and without a KV budget.

    Attributes
    ----------
    model, shape, tp
        Name to print, the sizes one of `tp` ranks holds.
    gpu_memory_bytes
        Memory of one GPU.
    prompt, generate, kv_budget, page_size
        Tokens, as in `capacity.held_tokens`.
    batch
        Requests to estimate; None takes the most that fit without a policy, at least 1.
    """

    model: str
    shape: ModelShape
    tp: int
    gpu_memory_bytes: int
    prompt: int
    generate: int
    kv_budget: int
    page_size: int
    batch: int | None

    def largest_batch(self, budget: int | None) -> int:
        """Return the most requests that fit with this budget; None is no policy."""
        return capacity.largest_batch(self._estimate(1, budget), self.gpu_memory_bytes)

    def estimate(self, budget: int | None) -> MemoryEstimate:
        """Return the memory of the batch with this budget; None is no policy."""
        batch = max(1, self.largest_batch(None)) if self.batch is None else self.batch
        return self._estimate(batch, budget)

    def _estimate(self, batch: int, budget: int | None) -> MemoryEstimate:
        return capacity.estimate(
            self.shape, batch, self.prompt, self.generate, budget, page_size=self.page_size
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON types."""
        without, within = self.estimate(None), self.estimate(self.kv_budget)
        return {
            **asdict(self),
            "batch": without.batch,
            "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            "query_state_bytes_per_request": self.shape.query_state_bytes(),
            "without_policy": {**asdict(without), "total_bytes": without.total_bytes},
            "with_policy": {**asdict(within), "total_bytes": within.total_bytes},
            "largest_batch_without_policy": self.largest_batch(None),
            "largest_batch_with_policy": self.largest_batch(self.kv_budget),
        }

    def lines(self) -> list[str]:
        """Return the text for people, every product written out."""
        s, memory = self.shape, _gb(self.gpu_memory_bytes)
        without, within = self.estimate(None), self.estimate(self.kv_budget)
        gpus = "" if self.tp == 1 else f" on each of {self.tp} GPUs"
        heads = f"{s.num_layers} layers x {s.num_query_heads} query heads"
        return [
            f"{self.model}: {s.num_parameters:,} parameters{gpus}",
            (
                f"KV cache per token: {s.kv_bytes_per_token:,} B = 2 (K, V) x {s.num_layers} layers"
                f" x {s.num_kv_heads} KV heads x {s.head_dim} x {s.dtype_bytes} B"
            ),
            (
                f"query state per request: {s.query_state_bytes():,} B = {heads}"
                f" x {capacity.DEFAULT_NUM_QUERIES} queries x {s.head_dim} x {s.dtype_bytes} B"
            ),
            "",
            (
                f"Batch {without.batch}, {self.prompt:,} prompt + {self.generate:,} generated"
                " tokens per request, without a policy:"
            ),
            *self._terms(without),
            f"The same with a KV budget of {self.kv_budget:,} tokens:",
            *self._terms(within),
            "",
            (
                f"Largest batch in {memory}: {self.largest_batch(None)} without a policy,"
                f" {self.largest_batch(self.kv_budget)} with the budget"
            ),
        ]

    def _terms(self, e: MemoryEstimate) -> list[str]:
        s, memory = self.shape, _gb(self.gpu_memory_bytes)
        kv = f"{e.batch} requests x {e.tokens_per_request:,} tokens x {s.kv_bytes_per_token:,} B"
        queries = f"{e.batch} requests x {s.query_state_bytes():,} B"
        fits = e.total_bytes <= self.gpu_memory_bytes
        terms = [
            ("weights", e.weight_bytes, f"{s.num_parameters:,} parameters x {s.dtype_bytes} B"),
            ("KV cache", e.kv_bytes, kv),
            ("query state", e.query_state_bytes, queries if e.query_state_bytes else "no policy"),
            ("overhead", e.overhead_bytes, "assumed: CUDA context, workspaces, activations"),
            ("total", e.total_bytes, f"of {memory}" if fits else f"does not fit in {memory}"),
        ]
        return [f"  {name:<11} {_gb(size):>10}  {how}" for name, size, how in terms]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
