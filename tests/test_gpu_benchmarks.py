"""What is measured on a GPU runs on a CPU, call by call."""

from __future__ import annotations

import os
import subprocess
import sys


def test_dry_run() -> None:
    result = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", "--dry-run"],
        env={**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ran = [line.split(",")[0].split()[0] for line in result.stdout.splitlines() if " ran" in line]
    assert set(ran) == {
        "query_append",
        "query_fold",
        "beacon_score",
        "select_topk",
        "kv_compact",
        "sparse_decode",
        "key_weights",
        "page_extrema",
        "page_bounds",
        "key_sketch",
        "sketch_logits",
    }
    assert "policy_share_of_step" in result.stdout
