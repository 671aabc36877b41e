"""Starts SGLang servers the way a user does, and talks to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

PROBE = Path(__file__).parent / "probe"
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

COMMANDS = {
    "launch_server": [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"],
    "serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
}


class Server:
    """One `python -m sglang.launch_server` process, and what its scheduler was seen to hold.

    Parameters
    ----------
    *args : str
        Command-line arguments after the model and the port.
    model : Path
    env : dict, optional
        Added to the environment; the strict memory checks are always on unless ``strict`` is off.
    threads : int
        OpenMP threads of the server.
    command : {"launch_server", "serve"}
        ``python -m sglang.launch_server`` or ``sglang serve``.
    """

    def __init__(
        self,
        *args: str,
        model: Path,
        env: dict[str, str] | None = None,
        threads: int = 2,
        strict: bool = True,
        timeout_s: float = 300,
        command: str = "launch_server",
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = Path(tempfile.mkdtemp(prefix="beacon-server-"))
        self.probe_log = self.directory / "probe.jsonl"
        self.log = self.directory / "server.log"
        argv = [
            *COMMANDS[command], "--model-path", str(model), "--port", str(self.port), *args,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "SERVER_PROBE_LOG": str(self.probe_log),
            "PYTHONPATH": os.pathsep.join([str(PROBE), os.environ.get("PYTHONPATH", "")]),
            **(STRICT if strict else {}),
            **(env or {}),
        }
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                argv,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.output()[-4000:]}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and requests.get(f"{self.url}/health", timeout=60).ok

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # Requests.

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 600) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout_s)

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        rid: str | None = None,
        logprobs: bool = False,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Generate greedily past any end token; returns the server's reply with ``tokens``."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
                **sampling,
            },
            "return_logprob": logprobs,
        }
        if rid is not None:
            body["rid"] = rid
        response = self.post("/generate", body)
        if not response.ok:
            raise RuntimeError(f"{response.status_code}: {response.text}\n{self.output()[-3000:]}")
        reply = response.json()
        reply["tokens"] = reply["output_ids"]
        if logprobs:
            reply["logprobs"] = [p for p, *_ in reply["meta_info"]["output_token_logprobs"]]
        return reply

    def generate_all(self, requests_: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run several `generate` calls at once, in the order given."""
        with ThreadPoolExecutor(len(requests_)) as pool:
            return list(pool.map(lambda kwargs: self.generate(**kwargs), requests_))

    def flush(self) -> None:
        assert self.post("/flush_cache", {}).ok

    def info(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/server_info", timeout=60).json()

    # What the probe saw.

    def steps(self, since: int = 0) -> list[dict[str, Any]]:
        """Forwards and retractions recorded so far, from record ``since`` on."""
        lines = self.probe_log.read_text().splitlines()[since:]
        return [json.loads(line) for line in lines]

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Wait until no request runs, by SGLang's own account."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            load = requests.get(f"{self.url}/v1/loads", timeout=30).json()["loads"][0]
            if not load["num_running_reqs"] and not load["num_waiting_reqs"]:
                return
            time.sleep(0.2)
        raise TimeoutError("the server is still busy")


def launch_error(
    *args: str, model: Path, env: dict[str, str] | None = None, timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run a launch that must not succeed; returns its exit code and output."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server",
         "--model-path", str(model), "--port", str(_free_port()), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
