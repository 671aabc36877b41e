"""A batch of active sets reads what each of them would read alone, from tables that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_beacon import ops
from sglang_beacon.ops import key_weights_triton, sparse_decode_triton
from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.active_batch import ActiveBatch, Entry
from sglang_beacon.runtime.active_set import ActiveSet
from sglang_beacon.runtime.selectors.exact import ExactSelector
from tests.support.kernels import DEVICE

LAYERS, KV_HEADS, GROUP, DIM, POOL = 2, 2, 2, 16, 900
HEADS = KV_HEADS * GROUP
SCALE = 1.5


def active_set(epsilon: float, ladder: tuple[int, ...]) -> ActiveSet:
    settings = RecasSettings(epsilon=epsilon, ladder=ladder, probe_interval=1)
    return ActiveSet(settings, ExactSelector(), 2, 4, LAYERS, DEVICE)


class Step:
    """A batch of five rows in the middle of its life; the second has no active set."""

    def __init__(self, seed: int, held: tuple[int, ...] = (150, 90, 30, 210, 120)) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys, self.values = (self.randn(LAYERS, POOL, KV_HEADS, DIM) for _ in range(2))
        slots = torch.randint(POOL, (len(held), max(held)), generator=self.generator)
        self.slots = slots.to(DEVICE)
        self.queries = self.randn(LAYERS, len(held), HEADS * DIM)
        self.output = self.randn(LAYERS, len(held), HEADS * DIM)
        kinds = [(0.5, (16, 32, 64)), (0.1, (32,)), (2.0, (8, 16, 128)), (1e-3, (64, 128))]
        rows = [row for row in range(len(held)) if row != 1]
        self.entries = [
            Entry(
                row,
                active_set(*kind),
                held[row],
                self.randn(LAYERS, KV_HEADS).abs() + 5,
                self.randn(LAYERS, HEADS).abs() + 1,
            )
            for row, kind in zip(rows, kinds, strict=False)
        ]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def together(self, batch: ActiveBatch, padding: int = 0) -> torch.Tensor:
        """Outputs [layers, rows, H_q * D], of a step that a graph would round up."""
        batch.begin(self.entries, self.slots)
        pad = (0, 0, 0, padding)
        output = torch.nn.functional.pad(self.output, pad)
        queries = torch.nn.functional.pad(self.queries, pad, value=torch.nan)
        for layer in range(LAYERS):
            pools = self.keys[layer], self.values[layer]
            batch.attend(layer, queries[layer], *pools, SCALE, output[layer])
        batch.end()
        return output

    def alone(self) -> tuple[torch.Tensor, list[ActiveSet]]:
        output, sets = self.output.clone(), []
        for row, active, held, value_norm, norms in self.entries:
            own = ActiveSet(active._settings, ExactSelector(), *active.always, LAYERS, DEVICE)
            sets.append(own)
            for layer in range(LAYERS):
                output[layer, row] = own.attend(
                    layer,
                    self.queries[layer, row].view(HEADS, DIM),
                    self.keys[layer],
                    self.values[layer],
                    self.slots[row, :held],
                    SCALE,
                    value_norm[layer],
                    norms[layer],
                ).flatten()
        return output, sets


def check(step: Step, output: torch.Tensor) -> None:
    expected, sets = step.alone()
    torch.testing.assert_close(output[:, : step.output.shape[1]], expected)
    for entry, own in zip(step.entries, sets, strict=True):
        for name in ("counts", "errors", "_dropped"):
            ours, theirs = (torch.stack(getattr(each, name)) for each in (entry.active, own))
            torch.testing.assert_close(ours, theirs)
        together, alone = entry.active.take_weights(), own.take_weights()
        if together is not None:
            torch.testing.assert_close(together, alone)
        reports = []
        for each in (entry.active, own):
            each.end(64)
            each.begin(66)
            reports.append(each.report)
        assert reports[0] == pytest.approx(reports[1])
        assert reports[0].steps == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_reads_what_each_would_read_alone(seed: int) -> None:
    step = Step(seed)
    check(step, step.together(ActiveBatch(LAYERS, HEADS, KV_HEADS, 0, 0, DEVICE)))
    ratios = [entry.active.report.ratio for entry in step.entries]
    assert min(ratios) < 0.5
    assert max(ratios) == 1


def test_captured_steps_find_everything_where_it_was() -> None:
    """Tables are larger than the batch, hold what the step before left, and do not move."""
    batch = ActiveBatch(LAYERS, HEADS, KV_HEADS, 8, 256, DEVICE)
    places = [table.data_ptr() for table in batch._captured]
    for seed, held in ((0, (150, 90, 30, 210, 120)), (1, (70, 256)), (2, (30, 40, 20, 33))):
        step = Step(seed, held)
        assert batch.can_be_captured(step.entries, len(held))
        output = step.together(batch, padding=8 - len(held))
        check(step, output)
        assert not output[:, len(held) :].any(), "padding was written to"
        assert batch._step is batch._captured
    assert places == [table.data_ptr() for table in batch._captured]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_that_was_captured_once_serves_other_batches() -> None:
    batch = ActiveBatch(LAYERS, HEADS, KV_HEADS, 8, 256, DEVICE)
    keys, values = (torch.zeros(LAYERS, POOL, KV_HEADS, DIM, device=DEVICE) for _ in range(2))
    queries, output = (torch.zeros(LAYERS, 8, HEADS * DIM, device=DEVICE) for _ in range(2))

    def run() -> None:
        for layer in range(LAYERS):
            batch.attend(layer, queries[layer], keys[layer], values[layer], SCALE, output[layer])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, held in ((0, (150, 90, 30, 210, 120)), (1, (70, 256)), (2, (30, 40, 20, 33))):
        step = Step(seed, held)
        batch.begin(step.entries, step.slots)
        keys.copy_(step.keys)
        values.copy_(step.values)
        queries[:, : len(held)] = step.queries
        output.zero_()
        output[:, : len(held)] = step.output
        graph.replay()
        batch.end()
        check(step, output)
        assert not output[:, len(held) :].any(), "padding was written to"


def test_what_has_no_room_in_the_tables_gets_its_own() -> None:
    batch = ActiveBatch(LAYERS, HEADS, KV_HEADS, 4, 256, DEVICE)
    for held in ((60, 50, 40, 30, 20), (60, 50, 257)):
        step = Step(3, held)
        assert not batch.can_be_captured(step.entries, len(held))
        check(step, step.together(batch))
    assert not batch._captured.limits.any()


def test_a_step_without_active_sets_writes_nothing() -> None:
    batch = ActiveBatch(LAYERS, HEADS, KV_HEADS, 8, 256, DEVICE)
    step = Step(0)
    step.together(batch)
    batch.begin([], None)
    output = step.output.clone()
    for layer in range(LAYERS):
        pools = step.keys[layer], step.values[layer]
        batch.attend(layer, step.queries[layer], *pools, SCALE, output[layer])
    assert torch.equal(output, step.output)


class NoHostAccess(TorchDispatchMode):
    """Refuses what a stream that is being captured refuses."""

    ASKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_to_copy")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.ASKS and not (name == "_to_copy" and "dtype" in (kwargs or {})):
            raise AssertionError(f"{func} asks the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_as_on_a_gpu() -> Iterator[None]:
    """The Triton kernels, interpreted; what the interpreter itself asks does not count."""

    def outside(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                return launch(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "key_weights", outside(key_weights_triton.key_weights))
        patch.setattr(ops, "sparse_decode", outside(sparse_decode_triton.sparse_decode))
        yield


def test_a_captured_step_asks_the_device_nothing() -> None:
    batch = ActiveBatch(LAYERS, HEADS, KV_HEADS, 8, 256, DEVICE)
    step = Step(5)
    batch.begin(step.entries, step.slots)
    output = step.output.clone()
    with kernels_as_on_a_gpu(), NoHostAccess():
        for layer in range(LAYERS):
            pools = step.keys[layer], step.values[layer]
            batch.attend(layer, step.queries[layer], *pools, SCALE, output[layer])
    batch.end()
    check(step, output)


def test_the_check_for_access_notices_one() -> None:
    with NoHostAccess(), pytest.raises(AssertionError, match="asks the device"):
        int(torch.ones(3).sum())
