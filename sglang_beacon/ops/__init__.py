"""Tensor operations, one per module: each a documented function with its torch reference."""

from sglang_beacon.ops.beacon_score import beacon_score
from sglang_beacon.ops.fps import farthest_point_sample
from sglang_beacon.ops.kv_compact import kv_compact
from sglang_beacon.ops.query_append import query_append
from sglang_beacon.ops.rope import RopeTable, derotate, rotate
from sglang_beacon.ops.select_topk import select_topk

__all__ = [
    "RopeTable",
    "beacon_score",
    "derotate",
    "farthest_point_sample",
    "kv_compact",
    "query_append",
    "rotate",
    "select_topk",
]
