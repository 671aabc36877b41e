"""The scoring kernel against FlashInfer's own logits; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_beacon import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs a GPU")


@pytest.mark.parametrize("listed", [1, 63, 64, 130, 1000])
def test_scores_follow_from_the_logits(listed: int) -> None:
    """And nothing is written past a row's end, where lanes hold what an earlier tile left."""
    from flashinfer_ext.beacon_logits import beacon_logits

    kv_heads, group, num_queries, dim = 2, 4, 32, 128
    device = {"dtype": torch.bfloat16, "device": "cuda"}
    queries = torch.randn(kv_heads * group, num_queries, dim, **device)
    pool = torch.randn(1200, kv_heads, dim, **device)
    slots = torch.randperm(1200, device="cuda")[:listed]
    logits = torch.full(
        (kv_heads, num_queries, group, listed + 70), torch.nan, device="cuda", dtype=torch.float32
    )
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    sums = beacon_logits(queries, pool, slots, dim**-0.5, workspace, logits)
    assert logits[..., listed:].isnan().all()
    weights = (logits[..., :listed] - sums[..., None]).exp2()
    visible = torch.full((num_queries,), listed, device="cuda")
    (score,) = ops.beacon_score([pool], slots, queries[None].float(), visible, dim**-0.5)
    torch.testing.assert_close(score, weights.amax((1, 2)), atol=1e-3, rtol=2e-2)
