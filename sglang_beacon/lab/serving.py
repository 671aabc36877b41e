"""Runs an SGLang server as a user would start it, for tutorials, benchmarks and tests."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

COMMANDS = {
    "launch_server": [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"],
    "serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
}
# Memory checks at every step of the scheduler: slow, and fatal where anything is lost.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Server:
    """One server process on a free local port; a context manager that ends it.

    It does not outlive the thread that starts it.

    Parameters
    ----------
    *args : str
        Command-line arguments besides the model and the port.
    model : Path
        Directory of the model.
    env : mapping, optional
        Added to the environment.
    threads : int
        OpenMP threads; on a small CPU, more than one only pays where nothing else runs.
    command : {"launch_server", "serve"}
        ``python -m sglang.launch_server`` or ``sglang serve``.
    timeout_s : float
        How long the start may take.

    Raises
    ------
    RuntimeError
        If the server does not start; the message ends with its output.
    """

    def __init__(
        self,
        *args: str,
        model: Path,
        env: Mapping[str, str] | None = None,
        threads: int = 2,
        command: str = "launch_server",
        timeout_s: float = 300,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.directory = Path(tempfile.mkdtemp(prefix="beacon-server-"))
        self.log = self.directory / "server.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*COMMANDS[command], "--model-path", str(model), "--port", str(port), *args],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **self._environment(env)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._wait(timeout_s)

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return dict(env or {})

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            if self.alive:
                return
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.output()[-4000:]}")

    @property
    def alive(self) -> bool:
        """Whether the server answers."""
        try:
            return requests.get(f"{self.url}/health", timeout=60).ok
        except requests.RequestException:
            return False

    def output(self) -> str:
        """What the server printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """End the server and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 3600) -> Any:
        """Send one request; returns the `requests.Response`."""
        return requests.post(self.url + path, json=body, timeout=timeout_s)

    def open_post(self, path: str, body: Mapping[str, Any], timeout_s: float = 3600) -> Any:
        """Send one request whose answer is read as it comes; closing it disconnects."""
        return requests.post(self.url + path, json=body, stream=True, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = 60) -> Any:
        """Ask for a page; returns the `requests.Response`."""
        return requests.get(self.url + path, timeout=timeout_s)

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        info: dict[str, Any] = self.get("/server_info").json()
        return info

    def loads(self) -> list[dict[str, Any]]:
        """Slots and requests of each data-parallel rank, by SGLang's own account."""
        loads: list[dict[str, Any]] = self.get("/v1/loads").json()["loads"]
        return loads

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Wait until no request runs or waits on the first rank."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            load = self.loads()[0]
            if not load["num_running_reqs"] and not load["num_waiting_reqs"]:
                return
            time.sleep(0.2)
        raise TimeoutError("the server is still busy")

    def retract_all(self) -> None:
        """Take all running requests' memory away; they are computed again and go on."""
        self.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        self.post("/continue_generation", {}).raise_for_status()

    def flush(self) -> None:
        """Empty the prefix tree."""
        self.post("/flush_cache", {}).raise_for_status()

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        rid: str | None = None,
        logprobs: bool = False,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Generate greedily past any end token.

        Returns
        -------
        dict
            The server's reply, with ``tokens`` and, if asked for, ``logprobs``.
        """
        body = self._body(input_ids, max_new_tokens, sampling)
        body["return_logprob"] = logprobs
        if rid is not None:
            body["rid"] = rid
        response = self.post("/generate", body)
        if not response.ok:
            raise RuntimeError(f"{response.status_code}: {response.text}\n{self.output()[-3000:]}")
        reply: dict[str, Any] = response.json()
        reply["tokens"] = reply["output_ids"]
        if logprobs:
            reply["logprobs"] = [p for p, *_ in reply["meta_info"]["output_token_logprobs"]]
        return reply

    def generate_all(self, jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Run several `generate` calls at once; replies in the order given."""
        return self.at_once(lambda job: self.generate(**job), jobs)

    def at_once(
        self, ask: Callable[[Any], dict[str, Any]], items: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """Ask something of all items at once; replies in the order given."""
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(ask, items))

    def stream(
        self, input_ids: Sequence[int], max_new_tokens: int, **sampling: Any
    ) -> Iterator[dict[str, Any]]:
        """Generate like `generate`, yielding each reply as it arrives."""
        body = self._body(input_ids, max_new_tokens, sampling)
        body["stream"] = True
        with self.open_post("/generate", body) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def _body(
        self, input_ids: Sequence[int], max_new_tokens: int, sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return {"input_ids": list(input_ids), "sampling_params": {**params, **sampling}}


def end_with_parent() -> None:
    """In a process just forked: end when the thread that started it does, killed or not (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A local TCP port that nobody listens on.

    Below the range that the system hands out by itself, or somebody else may have it by the time
    the server binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
