"""Servers that are started for a while."""

from __future__ import annotations

import subprocess
import sys
import time

CHILD = """
import os, subprocess
from sglang_beacon.lab.serving import end_with_parent
child = subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=end_with_parent)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_was_started_ends_with_who_started_it() -> None:
    """Even where that was killed."""
    done = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, check=False)
    pid = int(done.stdout)
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
