"""What a step reads first to find the retained tokens that matter to its query.

A selector orders a request's row positions, per KV head, and says for each size of an active set
how much attention the rest may have: the bound of any query head of the group. Three of them, for
three ways to know it (`runtime.bounds`).
"""

from __future__ import annotations

from sglang_beacon.policies.recas_settings import RecasSettings
from sglang_beacon.runtime.selectors.base import Selector
from sglang_beacon.runtime.selectors.exact import ExactSelector
from sglang_beacon.runtime.selectors.pages import PageSelector
from sglang_beacon.runtime.selectors.sketch import SketchSelector


def create(settings: RecasSettings, name: str, layers: int) -> Selector | None:
    """The selector of a name; None for ``"none"``."""
    if name == "pages":
        return PageSelector(layers)
    if name == "sketch":
        return SketchSelector(layers, settings)
    return ExactSelector() if name == "exact" else None
