"""One actor with its node, as a place for an engine; and the engine's process there.

Invariants:

- An actor that cannot be reached has lost its process: `gone` and `ended` are done, and nobody can tell how it ended.
- Whoever waits here waits in the service's loop, for a future that Ray's threads complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rollout_svc.engines.ray_connection import first_line
from rollout_svc.launching.cluster.host import Place
from rollout_svc.launching.launch import Launch, LaunchFailed

__all__ = ["RayProcess", "RaySeat", "result_of"]

_LOOK_S: Final = 10.0  # seconds for an actor that runs to say where it is
_WORD_S: Final = 5.0  # seconds for it to read the end of a log
_KILL_S: Final = 1.0  # seconds of `close` that are kept for the actor's own end


async def result_of(reference: Any, timeout_s: float) -> Any:
    """Wait for what a call of an actor returns; raises what it raised, or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(reference.future())


class RayProcess:
    """A process in an actor."""

    def __init__(self, actor: Any, pid: int) -> None:
        self.pid = pid
        self._actor = actor
        self.gone = asyncio.ensure_future(self._told("gone"))
        self.ended = asyncio.ensure_future(self._told("ended"))

    def __repr__(self) -> str:
        return f"<RayProcess {self.pid}{' ended' if self.ended.done() else ''}>"

    def ask(self) -> None:
        """Ask it to stop; nothing where it has ended."""
        self._actor.ask.remote()

    def kill(self) -> None:
        """End it and everything it started; nothing where it has ended."""
        self._actor.kill.remote()

    async def last_words(self) -> str:
        """The last lines of its log; empty where its node is gone."""
        try:
            return str(await result_of(self._actor.last_words.remote(), _WORD_S))
        except Exception:  # noqa: BLE001 - whatever Ray says of an actor that is gone: there are no words then
            return ""

    async def _told(self, what: str) -> int | None:
        try:
            code: int | None = await asyncio.wrap_future(getattr(self._actor, what).remote().future())
        except Exception:  # noqa: BLE001 - the actor, or its node, is gone, and the process with it
            return None
        return code


class RaySeat:
    """An actor that can start an engine on its node.

    Attributes:
        why: why it cannot be reached, where it cannot.
    """

    def __init__(self, actor: Any, on_release: Callable[[], object]) -> None:
        self.why = ""
        self._actor = actor
        self._on_release = on_release
        self._place: Place | None = None
        self._process: RayProcess | None = None

    def __repr__(self) -> str:
        return f"<RaySeat at {self._place.address if self._place else 'no place yet'}>"

    @property
    def place(self) -> Place:
        """Where it is; only once it was reached."""
        if self._place is None:
            raise ValueError("the actor has not been reached yet")
        return self._place

    @property
    def host(self) -> str:
        """Address of its node."""
        return self.place.address

    @property
    def python(self) -> str:
        """The interpreter there."""
        return self.place.python

    @property
    def log_folder(self) -> Path:
        """Where Ray keeps its logs there."""
        return Path(self.place.logs)

    @property
    def ports(self) -> tuple[int, ...]:
        """Some that nobody listened at when the actor was looked at."""
        return self.place.ports

    def is_free(self, _host: str, port: int) -> bool:
        """Whether nobody listened there when the actor was looked at."""
        return port in self.place.ports

    async def look(self, timeout_s: float = _LOOK_S) -> bool:
        """Ask the actor where it is; returns whether it answered."""
        try:
            self._place = await result_of(self._actor.where.remote(), timeout_s)
        except TimeoutError:
            self.why = "the cluster has no room for it now"
        except Exception as error:  # noqa: BLE001 - whatever Ray says of an actor that is gone
            self.why = f"{type(error).__name__}: {first_line(error)}"
        else:
            return True
        return False

    async def start(self, launch: Launch) -> RayProcess:
        """Start a process there.

        Raises:
            LaunchFailed: it cannot be started, or the actor is gone.
        """
        try:
            pid = await asyncio.wrap_future(self._actor.start.remote(launch).future())
        except Exception as error:
            cause = getattr(error, "cause", None)
            raise LaunchFailed(str(cause) if isinstance(cause, LaunchFailed) else first_line(error)) from error
        self._process = RayProcess(self._actor, pid)
        return self._process

    async def release(self) -> None:
        """End the actor, and with it what it runs."""
        import ray  # noqa: PLC0415 - as where the actor was made

        self._on_release()
        await asyncio.to_thread(ray.kill, self._actor)

    async def close(self, deadline: float) -> None:
        """End the process until `deadline` (loop time), then the actor."""
        left = deadline - _KILL_S - asyncio.get_running_loop().time()
        with contextlib.suppress(Exception):  # it is gone already, or goes now
            await result_of(self._actor.close.remote(left), left)
        await self.release()
