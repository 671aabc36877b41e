"""Hugging Face `generate` with kvpress, as a process of its own: needs nothing of this project.

    python benchmarks/kvpress_peer.py JOB.json

`benchmarks.peers` writes the job and runs this in an environment that has kvpress. Prints one JSON
line: tokens per second, and resident memory after loading and at its peak.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM


def main(job: dict) -> None:
    """Generate greedily for all prompts at once."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    loaded = psutil.Process().memory_info().rss
    press = nullcontext()
    if job["budget"]:
        import kvpress

        kept = int(job["budget"] * job["keep_ratio"])
        decoding = kvpress.DecodingPress(
            base_press=kvpress.SnapKVPress(window_size=job["window"], kernel_size=7),
            compression_interval=job["budget"] - kept,
            target_size=kept,
        )
        press = decoding(model)
    tokens = torch.tensor(job["prompts"])
    with torch.no_grad():
        model.generate(tokens[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    begin = time.perf_counter()
    with press, torch.no_grad():
        said = model.generate(
            tokens,
            max_new_tokens=job["new_tokens"],
            min_new_tokens=job["new_tokens"],
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    new = said.shape[1] - tokens.shape[1]
    result = {"tokens_per_s": len(tokens) * new / seconds, "loaded_mb": loaded / 1e6}
    print(json.dumps({**result, "peak_mb": peak / 1e6}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
