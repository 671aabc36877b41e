"""The other ways in: ``sglang serve`` with a YAML file, ``sglang.Engine``, two tensor ranks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from support.server import Server

ENGINE = """
    import sglang

    if __name__ == "__main__":
        engine = sglang.Engine(
            model_path=MODEL, skip_tokenizer_init=True, dtype="float32", max_total_tokens=1024,
            kv_policy="beacon", kv_budget=64,
        )
        params = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
        reply = engine.generate(input_ids=list(range(5, 25)), sampling_params=params)
        print("TOKENS", reply["output_ids"])
        print("POLICY", engine.get_server_info()["internal_states"][0]["kv_policy"]["policy"])
        engine.shutdown()
"""


def test_serve_and_engine(random_qwen3: Path, tmp_path: Path) -> None:
    """Both run the policy, and answer alike."""
    file = tmp_path / "server.yaml"
    file.write_text(
        "skip-tokenizer-init: true\ndtype: float32\nmax-total-tokens: 1024\n"
        "kv-policy: beacon\nkv-budget: 64\n"
    )
    with Server("--config", str(file), model=random_qwen3, threads=1, command="serve") as server:
        served = server.generate(list(range(5, 25)), 150)["tokens"]
        info = server.info()
        assert max(r["logical"] - r["held"] for s in server.steps() for r in s["reqs"]) > 50
    assert info["internal_states"][0]["kv_policy"]["budget"] == 64

    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent(ENGINE).replace("MODEL", repr(str(random_qwen3))))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert f"TOKENS {served}" in result.stdout
    assert "POLICY beacon" in result.stdout
