"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter, which has to be known when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# One heavy process at a time: spinning threads of two make both an order slower.
torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


@pytest.fixture(scope="session")
def random_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small random Qwen3 whose greedy output is diverse; no tokenizer."""
    from sglang_beacon.lab.random_model import save_random_qwen3

    return save_random_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of SmolLM2-135M-Instruct."""
    from sglang_beacon.lab.demo_model import ensure

    return ensure()
