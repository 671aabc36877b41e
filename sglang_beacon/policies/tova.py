"""TOVA: what the newest query attends to, in all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sglang_beacon.core import BufferShape
from sglang_beacon.policies.recent_window import RecentWindowPolicy


class TOVAPolicy(RecentWindowPolicy):
    """Keep what the newest query attends to, averaged over all heads of a layer.

    All heads of a layer, on one rank, keep the same tokens, as in the paper. Cost: one attention of
    one query per eviction.

    Reference: Oren et al., Transformers are Multi-State RNNs, EMNLP 2024 (arXiv 2401.06104).
    """

    name: ClassVar[str] = "tova"
    defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def observes(self) -> BufferShape:
        return BufferShape(0, 1)

    def score_layer(self, keys: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :, -1].softmax(-1).mean(dim=(0, 1)).expand(len(keys), -1)
