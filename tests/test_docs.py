"""What the documents point at is there."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = sorted(
    set(re.findall(r"`(tests/\S+?\.py)::(\w+)`", (ROOT / "docs" / "public-bugs.md").read_text()))
)


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_named_tests_exist(path: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / path).read_text()


def test_the_dashboard_asks_for_counters_that_exist() -> None:
    from sglang_beacon.srt.metrics import Counters

    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = re.findall(r"sglang:kv_policy_(\w+)", json.dumps(dashboard))
    counters = {f"{counter.name}_total" for counter in fields(Counters)}
    bounds = {"delta_bar_bucket", "error_bound_bucket"}
    known = counters | bounds | {"held_tokens", "seen_tokens"}
    assert set(asked) == known
