"""FlashInfer's attention over lists of slots, against its torch twin; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_beacon.ops.sparse_decode import sparse_decode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs a GPU")


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (5, 128)])
def test_equals_its_twin(group: int, dim: int) -> None:
    """Captured once and replayed with other lists."""
    from flashinfer_ext.per_head_decode import PerHeadSparseDecode, Shape

    shape = Shape(batch=3, query_heads=2 * group, kv_heads=2, head_dim=dim, width=300)
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    decode = PerHeadSparseDecode(shape, torch.bfloat16, workspace)
    queries = torch.randn(3, 2 * group, dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1000, 2, dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.randint(0, 1000, (3, 2, 300), dtype=torch.int32, device="cuda")
    counts = torch.full((3, 2), 300, dtype=torch.int32, device="cuda")
    case = (queries, k, v, slots, counts, dim**-0.5)
    decode.run(*case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = decode.run(*case)
    for seed in range(3):
        torch.manual_seed(seed)
        slots.random_(0, 1000)
        counts.random_(1, 301)
        graph.replay()
        expected = sparse_decode(*case)
        torch.testing.assert_close(output, expected.output, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected.lse, atol=2e-2, rtol=2e-2)
