"""The demo's child processes: started, waited for, watched, and ended together.

Invariants:

- A child is ready when it has said so, in one line `NAME.ready url=...`; it took a free port of its own.
- No child outlives this process: `close` ends them all, and each is on a leash should `close` never run.
- Children are no part of the terminal's foreground group: Ctrl-C is for this process, which then ends them.
- A child that died is named, with the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from rollout_svc.errors import RolloutError
from rollout_svc.launching import leashed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["Child", "ChildFailed", "Children"]

READY_POLL_S: Final = 0.05
"""How often a starting child's log is looked at."""
STOP_GRACE_S: Final = 5.0
"""For all children together, between the request to stop and the kill."""
TAIL_LINES: Final = 15
"""Lines of a dead child's log that are shown."""


class ChildFailed(RolloutError):
    """Raised when a child process died, or did not become ready in time."""


@dataclass(slots=True)
class Child:
    """One process, by its leash, and the file with all it has said."""

    name: str
    ready_word: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def tail(self) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:]) or "(it said nothing)"

    def check(self) -> None:
        """Raise ChildFailed where the process has ended."""
        code = self.process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ChildFailed(f"{self.name} ended with {how}; the end of {self.log}:\n{self.tail()}")

    def kill(self) -> None:
        """Have its leash end it, and whatever it started, at once."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self.process.stdin.fileno(), b"k")

    def find_url(self) -> str | None:
        """Return the address of the ready line, where it was written."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        found = re.search(rf"^{re.escape(self.ready_word)}\.ready url=(\S+)\s", text, re.MULTILINE)
        return found.group(1) if found else None


class Children:
    """Every child of a run; a context manager."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __repr__(self) -> str:
        alive = sum(child.process.poll() is None for child in self._children)
        return f"<Children {alive} of {len(self._children)} alive>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, ready_word: str, module: str, arguments: Sequence[str]) -> Child:
        """Start `python -m MODULE ARGUMENTS` on a leash, with one torch thread, its output in `NAME.log`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603  our own interpreter, our own modules
                leashed([sys.executable, "-m", module, *arguments]),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        child = Child(name, ready_word, process, log)
        self._children.append(child)
        return child

    def wait_ready(self, children: Sequence[Child], timeout_s: float, progress: Callable[[str], None]) -> None:
        """Wait until every one of them has said where it listens.

        Raises:
            ChildFailed: one died, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(children)
        while waiting:
            for child in tuple(waiting):
                url = child.find_url()
                if url is not None:
                    child.url = url
                    waiting.remove(child)
                    progress(f"{child.name} listens at {url}")
            self.check()
            if waiting and time.monotonic() >= deadline:
                late = waiting[0]
                raise ChildFailed(f"{late.name} is not ready after {timeout_s:g} s; it said:\n{late.tail()}")
            if waiting:
                time.sleep(READY_POLL_S)

    def check(self) -> None:
        """Raise ChildFailed for the first child that has ended."""
        for child in self._children:
            child.check()

    def close(self) -> None:
        """Ask all to stop, then make them; returns when none is left. Idempotent, safe before start."""
        children, self._children = self._children, []
        # The service first in order of asking: it stops using the engines, which stop last.
        for child in reversed(children):
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()
