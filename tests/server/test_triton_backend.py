"""SGLang's Triton attention backend, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from support.server import Server, check_decode_steps
from transformers import AutoModelForCausalLM

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.random_model import random_prompt
from sglang_beacon.lab.simulator import Simulator

BUDGET, GENERATED = 32, 18


def test_equals_simulator(random_qwen3: Path) -> None:
    """The tokens of a torch_native server, which are the simulator's, through evictions."""
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    prompts = [random_prompt(length, length) for length in (20, 34)]
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(BUDGET), "--max-total-tokens", "1024",
        "--attention-backend", "triton", model=random_qwen3, threads=1, env=interpreter,
    ) as server:  # fmt: skip
        replies = server.generate_all(
            [{"input_ids": ids, "max_new_tokens": GENERATED} for ids in prompts]
        )
        check_decode_steps(server.steps())
    model = AutoModelForCausalLM.from_pretrained(random_qwen3, dtype=torch.float32).eval()
    simulator = Simulator(model, KVPolicyConfig(policy="beacon", budget=BUDGET))
    for ids, reply in zip(prompts, replies, strict=True):
        expected = simulator.generate(ids, GENERATED)
        assert len(expected.kept) >= 2
        assert reply["tokens"] == expected.tokens
