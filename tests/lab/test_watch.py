"""What the terminal view shows, and what it says where there is nothing to see."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from sglang_beacon.cli import main
from sglang_beacon.lab.serving import free_port
from sglang_beacon.lab.watch import render

STATE: dict[str, Any] = {
    "policy": "recas",
    "budget": 2048,
    "counters": {"evictions": 12, "evicted_tokens": 3456, "budget_expansions": 2},
}


def request(rid: str, seen: int, held: int, **more: Any) -> dict[str, Any]:
    return {
        "rid": rid, "policy": "recas", "logical_tokens": seen, "held_tokens": held,
        "evictions": 3, **more,
    }  # fmt: skip


def shown(state: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(state))
    return console.export_text()


def test_running_requests() -> None:
    recas = {"retention": {"error_largest": 0.01234}}
    running = [request("abc", 8000, 2000, recas=recas), request("def", 1000, 1000)]
    text = shown({**STATE, "requests": running, "requests_in_all": 70})
    assert "recas, budget 2,048   evictions 12   evicted tokens 3,456   budgets grown 2" in text
    first, second = (line for line in text.splitlines() if line.startswith(("abc", "def")))
    assert "8,000" in first
    assert "2,000" in first
    assert "0.0123" in first
    # A quarter of the longest request is held.
    assert first.count("█") * 3 == first.count("·") == 18
    assert second.count("·") == 0
    assert "and 68 more" in text


def test_an_empty_server() -> None:
    assert "no request is running" in shown({**STATE, "requests": [], "requests_in_all": 0})


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", f"http://127.0.0.1:{free_port()}"]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert said.count("\n") == 1
    assert main(["watch", "nonsense"]) == 1


@pytest.mark.parametrize("body", [{}, {"internal_states": []}, {"internal_states": [{}]}, []])
def test_another_server(body: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert main(["watch", f"http://127.0.0.1:{server.server_port}"]) == 1
    assert "is no SGLang server with a --kv-policy" in capsys.readouterr().err
    server.shutdown()
