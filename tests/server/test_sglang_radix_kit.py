"""SGLang's own test of its prefix tree: 400 prompts that grow from each other, all at once."""

from __future__ import annotations

import random

import pytest
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import save_random_qwen3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    # The kit draws tokens below 32,000.
    model = save_random_qwen3(tmp_path_factory.mktemp("wide"), vocabulary=32_000)
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", "128", "--page-size", "16", "--max-total-tokens", "20000",
        "--radix-eviction-policy", "shared-prefix", model=model, threads=1,
    ) as server:  # fmt: skip
        yield server


@pytest.mark.slow
def test_radix_attention(server: Server) -> None:
    random.seed(0)
    run_radix_attention_test(server.url)
    decoded = check_decode_steps(server.steps())
    assert max(req["logical"] - req["held"] for req in decoded) > 100
    assert "Tree Core: UnifiedTreeCore" in server.output()
    server.wait_idle()
    assert server.alive
