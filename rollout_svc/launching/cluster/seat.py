"""One actor with its node, as a place for an engine; and the engine's process there.

Invariants:

- An actor that is dead has lost its process: `gone` and `ended` are done, and nobody can tell how it ended. One that
  Ray calls unavailable may be either, and is asked again until Ray knows.
- The actor is held on to from the first look until it is dropped: it ends then, whatever Ray knows of its node.
- Every wait but that for the end of the process has a bound.
- Whoever waits here waits in the service's loop, for a future that Ray's threads complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from rollout_svc.launching.cluster.grouped import grouped
from rollout_svc.launching.cluster.holding import Grip, hold
from rollout_svc.launching.cluster.host import Place
from rollout_svc.launching.launch import Launch, LaunchFailed
from rollout_svc.tensors.ray_connection import first_line

__all__ = ["RayProcess", "RaySeat", "result_of"]

_LOOK_S: Final = 10.0  # seconds for an actor that runs to say where it is
_HOLD_S: Final = 10.0  # seconds to connect to it: milliseconds, where its node can be reached
_WORD_S: Final = 5.0  # seconds for it to read the end of a log
_START_S: Final = 60.0  # seconds for it to start a process: its own leash has half of that
_OUTLIVE_S: Final = 12.0  # seconds in which a leash ends what it holds, with some to spare
_AGAIN_S: Final = 1.0  # seconds between two questions to an actor of which Ray cannot tell whether it lives
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
        from ray.exceptions import ActorUnavailableError  # noqa: PLC0415 - as where the actor was made

        while True:
            try:
                code: int | None = await asyncio.wrap_future(getattr(self._actor, what).remote().future())
            except ActorUnavailableError:  # its node does not answer; Ray finds out, after its own health check
                await asyncio.sleep(_AGAIN_S)
            except Exception:  # noqa: BLE001 - the actor, or its node, is gone, and the process with it
                return None
            else:
                return code


class RaySeat:
    """An actor that can start an engine on its node.

    Attributes:
        why: why it cannot be reached, where it cannot.
        log_prefix: before the name of a log there.
        leash_pid: number of the last leash there; 0: there was none.
    """

    def __init__(
        self,
        actor: Any,
        log_prefix: str,
        on_release: Callable[[], Awaitable[None]],
        within: tuple[str, int] | None = None,
    ) -> None:
        """Make a seat of an actor.

        Args:
            actor: an `EngineHost`, which may be nowhere yet.
            log_prefix: before the name of a log there.
            on_release: gives the place back.
            within: id and bundle of a group of somebody else's that the engine is to find itself in.
        """
        self.why = ""
        self.log_prefix = log_prefix
        self.leash_pid = 0
        self._actor = actor
        self._on_release = on_release
        self._within = within
        self._lost = False
        self._place: Place | None = None
        self._grip: Grip | None = None
        self._process: RayProcess | None = None

    def __repr__(self) -> str:
        return f"<RaySeat at {self._place.address if self._place else 'no place yet'}>"

    @property
    def placed(self) -> bool:
        """Whether it was reached."""
        return self._place is not None

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
        if self._lost or (self._grip is not None and self._grip.over):
            return False
        try:
            if self._grip is None:
                await self._take_hold(timeout_s)
            self._place = await result_of(self._actor.where.remote(), timeout_s)
        except TimeoutError:
            self.why = f"its actor did not answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever Ray says of an actor that is gone
            self.why = f"{type(error).__name__}: {first_line(error)}"
        else:
            return True
        return False

    async def _take_hold(self, timeout_s: float) -> None:
        """Hold on to the actor, which ends once it is let go of; raises what `look` tells of."""
        door = await result_of(self._actor.listen.remote(), timeout_s)
        try:
            self._grip = await hold(door, _HOLD_S)
        except OSError as error:  # a TimeoutError as well, which is not the actor's
            raise LaunchFailed(f"{door.address}:{door.port} cannot be reached from the service: {error}") from error
        if self._lost:  # it was dropped meanwhile
            self._grip.let_go()
            raise LaunchFailed("it was given up")

    async def start(self, launch: Launch) -> RayProcess:
        """Start a process there.

        Raises:
            LaunchFailed: it cannot be started, or the actor is gone.
        """
        env = {"RAY_ADDRESS": self.place.cluster, **launch.env}  # else an engine that joins may find another cluster
        command = launch.command if self._within is None else grouped(self.python, *self._within, launch.command)
        try:
            started = self._actor.start.remote(Launch(command, env, launch.log))
            pid, self.leash_pid = await result_of(started, _START_S)
        except TimeoutError:
            self._lost = True  # what it may have started ends with the actor
            raise LaunchFailed(f"the actor at {self.host} did not answer within {_START_S:g} s") from None
        except Exception as error:
            if isinstance(cause := getattr(error, "cause", None), LaunchFailed):
                raise LaunchFailed(str(cause)) from error
            self._lost = True  # as above: Ray cannot tell whether the actor heard it
            raise LaunchFailed(first_line(error)) from error
        self._process = RayProcess(self._actor, pid)
        return self._process

    async def outlive(self, leash_pid: int) -> None:
        """Wait until a leash of an earlier actor on this node has ended."""
        if leash_pid:
            with contextlib.suppress(Exception):  # whatever it is, the start tells
                await result_of(self._actor.outlive.remote(leash_pid, _OUTLIVE_S), _OUTLIVE_S + _LOOK_S)

    def drop(self) -> None:
        """End the actor, and with it what it runs; its place stays the engine's."""
        import ray  # noqa: PLC0415 - as where the actor was made

        self._lost = True
        if self._grip is not None:
            self._grip.let_go()  # arrives also where Ray does not: at a node that is out of the cluster
        if ray.is_initialized():  # else it ended when this process left the cluster, and Ray would start one to tell it
            ray.kill(self._actor)  # sends a word and waits for nothing

    async def release(self) -> None:
        """End the actor, and give its place back."""
        self.drop()
        await self._on_release()

    async def close(self, deadline: float) -> None:
        """End the process until `deadline` (loop time), then the actor."""
        if not self.placed or self._lost:
            await self.release()
            return
        left = deadline - _KILL_S - asyncio.get_running_loop().time()
        with contextlib.suppress(Exception):  # it is gone already, or goes now
            await result_of(self._actor.close.remote(left), left)
        await self.release()
