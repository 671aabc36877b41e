"""The conditions of a measurement, stored beside every number."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def conditions() -> dict[str, Any]:
    """Date, hardware, versions and commit."""
    import os

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": gpu,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("sglang", "torch", "triton", "sglang-beacon")},
        "commit": commit.stdout.strip() or None,
    }


def store(name: str, record: dict[str, Any]) -> None:
    """Print one JSON line and append it to ``benchmarks/results/<name>.jsonl``."""
    line = json.dumps({**record, "conditions": conditions()})
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
