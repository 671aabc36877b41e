"""The same answer as the simulator in SGLang's other modes: no radix cache, no overlap, chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.server import Server
from transformers import AutoModelForCausalLM

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import VOCABULARY
from sglang_beacon.lab.simulator import Simulator

CHUNK = 64
MODES = {
    # Nothing is pinned: the prompt, twice the budget, is compressed like everything else.
    "no-radix": (["--disable-radix-cache"], {"prompt_in_tree": False}),
    "no-overlap": (["--disable-overlap-schedule"], {}),
}


@pytest.fixture(scope="module", params=list(MODES))
def mode(random_qwen3: Path, request: pytest.FixtureRequest):
    flags, simulated = MODES[request.param]
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon", "--kv-budget", "72",
        "--max-total-tokens", "2048", "--chunked-prefill-size", str(CHUNK), *flags,
        model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server, simulated


@pytest.mark.parametrize("policy", ["beacon", "random"])
@pytest.mark.parametrize("length", [40, 64, 150])
def test_equals_simulator(mode, random_qwen3: Path, policy: str, length: int) -> None:
    server, simulated = mode
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    config = KVPolicyConfig(policy=policy, budget=72)
    expected = Simulator(model, config).generate(prompt, 200, chunk_size=CHUNK, **simulated)
    server.flush()
    reply = server.generate(prompt, 200, custom_params={"kv_policy": policy})
    assert len(expected.kept) >= 5
    assert reply["tokens"] == expected.tokens
