"""Tensor operations, one per module: a documented torch reference and, for GPUs, its kernels."""

from sglang_beacon.ops import beacon_score as _beacon_score
from sglang_beacon.ops import fps as _fps
from sglang_beacon.ops import key_sketch as _key_sketch
from sglang_beacon.ops import key_weights as _key_weights
from sglang_beacon.ops import kv_compact as _kv_compact
from sglang_beacon.ops import page_bounds as _page_bounds
from sglang_beacon.ops import page_extrema as _page_extrema
from sglang_beacon.ops import query_append as _query_append
from sglang_beacon.ops import query_fold as _query_fold
from sglang_beacon.ops import select_topk as _select_topk
from sglang_beacon.ops import sketch_logits as _sketch_logits
from sglang_beacon.ops import sparse_decode as _sparse_decode
from sglang_beacon.ops.dispatch import by_device
from sglang_beacon.ops.rope import RopeTable, average_rotation, derotate, rotate

beacon_score = by_device(_beacon_score.beacon_score)
farthest_point_sample = by_device(_fps.farthest_point_sample)
key_sketch = by_device(_key_sketch.key_sketch)
key_weights = by_device(_key_weights.key_weights)
kv_compact = by_device(_kv_compact.kv_compact)
page_bounds = by_device(_page_bounds.page_bounds)
page_extrema = by_device(_page_extrema.page_extrema)
query_append = by_device(_query_append.query_append)
query_fold = by_device(_query_fold.query_fold)
select_topk = by_device(_select_topk.select_topk)
sketch_logits = by_device(_sketch_logits.sketch_logits)
sparse_decode = by_device(_sparse_decode.sparse_decode)

__all__ = [
    "RopeTable",
    "average_rotation",
    "beacon_score",
    "derotate",
    "farthest_point_sample",
    "key_sketch",
    "key_weights",
    "kv_compact",
    "page_bounds",
    "page_extrema",
    "query_append",
    "query_fold",
    "rotate",
    "select_topk",
    "sketch_logits",
    "sparse_decode",
]
