"""Fixtures of the tests that run servers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def page_size(request: pytest.FixtureRequest) -> int:
    """Tokens per page of the module's server."""
    return request.param
