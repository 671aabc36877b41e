"""Tensor operations, one per module: a documented torch reference and, for GPUs, its kernels."""

from sglang_beacon.ops import beacon_score as _beacon_score
from sglang_beacon.ops import fps as _fps
from sglang_beacon.ops import kv_compact as _kv_compact
from sglang_beacon.ops import query_append as _query_append
from sglang_beacon.ops import query_fold as _query_fold
from sglang_beacon.ops import select_topk as _select_topk
from sglang_beacon.ops import sparse_decode as _sparse_decode
from sglang_beacon.ops.dispatch import by_device
from sglang_beacon.ops.rope import RopeTable, derotate, rotate

beacon_score = by_device(_beacon_score.beacon_score)
farthest_point_sample = by_device(_fps.farthest_point_sample)
kv_compact = by_device(_kv_compact.kv_compact)
query_append = by_device(_query_append.query_append)
query_fold = by_device(_query_fold.query_fold)
select_topk = by_device(_select_topk.select_topk)
sparse_decode = by_device(_sparse_decode.sparse_decode)

__all__ = [
    "RopeTable",
    "beacon_score",
    "derotate",
    "farthest_point_sample",
    "kv_compact",
    "query_append",
    "query_fold",
    "rotate",
    "select_topk",
    "sparse_decode",
]
