"""Test servers: strict memory checks on, and a probe in the scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_beacon.lab import serving

PROBE = Path(__file__).parent / "probe"


class Server(serving.Server):
    """A server whose scheduler checks its memory at every step and says what it holds.

    It sleeps when idle, to leave the cores to what the test computes meanwhile.
    """

    def __init__(self, *args: str, **kwargs: Any) -> None:
        super().__init__(*args, "--sleep-on-idle", **kwargs)

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        path = os.pathsep.join([str(PROBE), os.environ.get("PYTHONPATH", "")])
        self.probe_log = self.directory / "probe.jsonl"
        # Servers run as they are, not in Triton's interpreter.
        probe = {
            "TRITON_INTERPRET": "0",
            "SERVER_PROBE_LOG": str(self.probe_log),
            "PYTHONPATH": path,
        }
        return {**serving.STRICT, **probe, **(env or {})}

    def steps(self, since: int = 0) -> list[dict[str, Any]]:
        """Forwards and retractions recorded so far, from record ``since`` on."""
        # The scheduler may be within a line.
        written, _, _ = self.probe_log.read_text().rpartition("\n")
        lines = written.splitlines()[since:]
        return [json.loads(line) for line in lines]

    def generate_at_once(self, jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Like `generate_all`, with all requests at the scheduler before it begins."""
        self.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(self.generate_all, jobs)
            time.sleep(1)
            self.post("/continue_generation", {}).raise_for_status()
            return replies.result()


def check_decode_steps(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check lengths and positions of every decoded token; returns one record for each.

    Attention reads what is held, and a token sits at the place it has among all that was seen.
    What the prefix tree owns never changes.
    """
    decoded = []
    for step in steps:
        assert not step.get("tree_changed")
        if step["mode"] == "DECODE":
            for index, req in enumerate(step["reqs"]):
                assert step["positions"][index] == req["logical"] - 1
                assert step["seq_lens"][index] == req["held"] == req["committed"]
                decoded.append(req)
    return decoded


def launch_error(
    *args: str, model: Path, env: Mapping[str, str] | None = None, timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run a launch that must not succeed; returns its exit code and output."""
    port = str(serving.free_port())
    command = serving.COMMANDS["launch_server"]
    return subprocess.run(
        [*command, "--model-path", str(model), "--port", port, *args],
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
