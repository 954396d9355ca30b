"""What starting a process means to whoever asks for one; `processes.py` does it.

Invariant: pure: values and protocols, no process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout_svc.errors import RolloutError

__all__ = ["Launch", "LaunchFailed", "Launcher", "Process", "how_it_ended"]


class LaunchFailed(RolloutError):
    """Raised when a process could not be started; the message says what the system said."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to be started.

    Attributes:
        command: the program and its arguments, complete.
        env: laid over the environment of this process; not in `repr`, for it may carry keys.
        log: the file that gets everything it says, after what is there.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path

    def __repr__(self) -> str:
        return f"<Launch {self.command[0]} log={self.log}>"


class Process(Protocol):
    """A process that runs, with whatever it starts itself."""

    @property
    def pid(self) -> int:
        """Its number; it leads a session and a process group."""

    @property
    def gone(self) -> asyncio.Future[int | None]:
        """Done when it has ended: its exit code, minus its signal, or None where nobody can tell."""

    @property
    def ended(self) -> asyncio.Future[int | None]:
        """Done, with the same, when what it left behind is gone as well."""

    def ask(self) -> None:
        """Ask it to stop (SIGTERM)."""

    def kill(self) -> None:
        """End it, and everything it started."""


class Launcher(Protocol):
    """Starts processes, and owns them."""

    def is_free(self, host: str, port: int) -> bool:
        """Whether a process could listen there now."""

    async def start(self, launch: Launch) -> Process:
        """Start a process; raises LaunchFailed."""

    async def last_words(self, log: Path) -> str:
        """The last lines of a log."""

    async def close(self, deadline: float) -> None:
        """End every process until `deadline` (loop time), which leaves time for the kill; idempotent."""


def how_it_ended(code: int | None) -> str:
    """Say how a process ended, in words that fit after "it"."""
    if code is None:
        return "was lost with its leash"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
