"""Real processes for tests: small programs that misbehave, and who is left of a session."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["FAMILY", "PYTHON", "in_session", "lives", "parent", "read_pids", "until"]

PYTHON = [sys.executable, "-I", "-S"]
"""Starts in milliseconds."""

FAMILY = """
import os, signal, sys, time
written = sys.argv[1]
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()                     # out of the session, and deaf as well
    with open(written, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)
with open(written, "a") as file:
    file.write(f"{os.getpid()}\\n")
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("family", flush=True)
time.sleep(600)
"""
"""A program that has a child and a grandchild, both deaf to SIGTERM, the latter in a session of its own; writes their
three numbers to the file of its first argument."""


def until(holds: Callable[[], bool], what: str = "", timeout_s: float = 20.0) -> None:
    """Wait, outside a loop, until something holds."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def read_pids(path: Path, count: int) -> list[int]:
    """Wait for that many numbers in a file."""

    def read() -> list[int]:
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    until(lambda: len(read()) == count, f"{count} numbers in {path}")
    return read()


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def lives(pid: int) -> bool:
    """Whether a process runs: one that only waits to be collected does not."""
    return _stat(pid)[0] not in {"X", "Z"}


def parent(pid: int) -> int:
    """Who started a process, or adopted it."""
    return int(_stat(pid)[1])


def in_session(leader: int) -> list[int]:
    """The processes of a session that run."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if lives(pid) and len(found := _stat(pid)) > 3 and int(found[3]) == leader]
