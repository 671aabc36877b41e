"""Page tables of single heads, read as FlashInfer reads them, give what the torch twin gives."""

from __future__ import annotations

import pytest
import torch

from flashinfer_ext.rows import fill_rows, pages_of_heads, plan_rows
from sglang_beacon import ops


def paged_attention(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    row_lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the masked variant computes of rows of queries [rows, G, D], by definition."""
    outputs, sums = [], []
    for row, query in enumerate(queries):
        page = pages[indptr[row] : indptr[row + 1]].long()
        logits = query @ k_pages[page, 0, 0].T * scale
        logits[:, row_lengths[row] :] = -torch.inf
        outputs.append(logits.softmax(-1) @ v_pages[page, 0, 0])
        sums.append(logits.logsumexp(-1))
    return torch.stack(outputs), torch.stack(sums)


@pytest.mark.parametrize(("group", "width"), [(1, 9), (4, 9), (3, 16)])
def test_rows_are_the_lists(group: int, width: int) -> None:
    batch, kv_heads, dim = 3, 2, 8
    generator = torch.Generator().manual_seed(width)
    queries = torch.randn(batch, kv_heads * group, dim, generator=generator)
    k, v = torch.randn(2, 50, kv_heads, dim, generator=generator)
    slots = torch.randint(0, 50, (batch, kv_heads, 9), generator=generator, dtype=torch.int32)
    counts = torch.randint(1, 10, (batch, kv_heads), generator=generator, dtype=torch.int32)
    pages = torch.full((batch * kv_heads * width,), -1, dtype=torch.int32)
    fill_rows(torch.where(torch.arange(9) < counts[..., None], slots, -5), counts, pages)
    assert pages.min() >= 0
    assert pages.max() < 50 * kv_heads
    plan = plan_rows(batch, kv_heads, width, "cpu")
    output, lse = paged_attention(
        queries.view(batch * kv_heads, group, dim),
        pages_of_heads(k),
        pages_of_heads(v),
        plan.indptr,
        pages,
        counts.flatten(),
        0.4,
    )
    expected = ops.sparse_decode(queries, k, v, slots, counts, 0.4)
    torch.testing.assert_close(output.view_as(queries), expected.output)
    torch.testing.assert_close(lse.view(batch, -1), expected.lse)


def test_pools_that_cannot_be_viewed_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pages_of_heads(torch.zeros(2, 6, 4).transpose(0, 1))
    huge = torch.zeros(1, dtype=torch.int8).expand(2**28, 8, 1)
    with pytest.raises(ValueError, match=r"contiguous|int32"):
        pages_of_heads(huge)
