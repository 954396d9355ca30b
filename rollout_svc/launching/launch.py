"""What starting a process means to whoever asks for one; `processes.py` does it.

Invariant: pure: values and protocols, no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout_svc.config import LaunchConfig
from rollout_svc.errors import RolloutError
from rollout_svc.exits import how_it_ended

__all__ = ["Launch", "LaunchFailed", "Launcher", "Process", "Seat", "how_it_ended"]


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

    async def last_words(self) -> str:
        """The last lines of its log."""


class Seat(Protocol):
    """A place for one engine: a machine, and what is known of it."""

    @property
    def host(self) -> str | None:
        """Address at which the engine listens and is reached; None: as it is configured."""

    @property
    def python(self) -> str:
        """The interpreter there."""

    @property
    def log_folder(self) -> Path | None:
        """Where a log goes that was given no place; None: below the folder the service runs in."""

    @property
    def log_prefix(self) -> str:
        """Before the worker's id in the name of a log there, which others share."""

    @property
    def ports(self) -> Sequence[int]:
        """To choose from, where none is configured."""

    def is_free(self, host: str, port: int) -> bool:
        """Whether a process could listen there now."""

    async def start(self, launch: Launch) -> Process:
        """Start a process; raises LaunchFailed."""

    async def release(self) -> None:
        """Give the place back: its engine has ended, and is not started again."""


class Launcher(Protocol):
    """Has places for engines, and owns what runs there."""

    @property
    def here(self) -> Seat | None:
        """The place of every engine, where that is known before any is started; None: each gets one when it starts."""

    async def seat(self, worker_id: str, config: LaunchConfig, tell: Callable[[str], object]) -> Seat:
        """Give an engine a place: the one it had, or another where that one is gone.

        Args:
            worker_id: whose engine it is.
            config: what it needs.
            tell: is called with what is waited for, where it takes a while.

        Raises:
            LaunchFailed: there is none now.
        """

    async def close(self, deadline: float) -> None:
        """End every process until `deadline` (loop time), which leaves time for the kill; idempotent."""
