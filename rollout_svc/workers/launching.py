"""Keeps the processes of the engines that we start ourselves: one task each, from the first start to the last.

Invariants:

- An engine that loads is left alone, however long it does not answer: only the end of its process restarts it.
- The supervisor learns of that end in the turn in which it is known, before anything else is done about it.
- A process is started again where its worker was before, or somewhere else; never at an address of another worker.
- No process is started for a worker that was removed, nor once the service stops. The launcher owns what runs: a keeper
  that is cancelled leaves it to the launcher's `close`.
- A worker whose restarts are used up is DEAD for good, and says so with exit code and log.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

from rollout_svc.config import LaunchConfig
from rollout_svc.engines import Endpoint
from rollout_svc.events import EngineDoubted, EngineExited, EngineStarted, EventBus
from rollout_svc.launching import Launch, Launcher, LaunchFailed, Process, Restarts, Seat, choose_port, how_it_ended
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.launched import Launched
from rollout_svc.workers.placement import Groups, environment, ignored
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.supervisor import Supervisor
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Launching"]

_GRACE_S: Final = 10.0  # seconds a removed engine has to end by itself
_KILLED_S: Final = 5.0  # seconds in which the end of what is killed, or left behind, is waited for


@dataclass(slots=True)
class _Kept:
    """A launched worker.

    Attributes:
        leaving: done once the worker was removed.
        proved: whether its command has ever answered.
        process: the one that runs.
        seat: where it runs, or ran last.
    """

    worker: Worker
    config: LaunchConfig
    launched: Launched
    restarts: Restarts
    leaving: asyncio.Future[None]
    proved: bool = False
    process: Process | None = None
    seat: Seat | None = None


class Launching:
    """Starts, restarts and ends engines; see the module's invariants."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        supervisor: Supervisor,
        launcher: Launcher,
        groups: Groups,
        tasks: TaskOwner,
        bus: EventBus,
        rng: Random,
    ) -> None:
        self._pool = pool
        self._supervisor = supervisor
        self._launcher = launcher
        self._groups = groups
        self._tasks = tasks
        self._bus = bus
        self._rng = rng
        self._kept: dict[str, _Kept] = {}
        self._held = False
        self._unplaced = 0
        supervisor.on_removed = self._removed

    def place(self, config: LaunchConfig) -> str:
        """Choose the address of an engine that is to be launched; where its place is not known yet, one of nobody.

        Raises:
            LaunchFailed: no port is free.
        """
        if self._launcher.here is not None:
            return self._url(config, self._launcher.here, None)
        self._unplaced += 1
        return f"http://unplaced-{self._unplaced}.invalid"

    def keep(self, worker: Worker, config: LaunchConfig) -> None:
        """Start the process of a worker that was added, and see to it from now on."""
        launched = worker.launched = Launched(_log(config, self._launcher.here, worker.worker_id))
        kept = _Kept(
            worker,
            config,
            launched,
            Restarts(config.restarts, config.restart_window_s, self._rng),
            asyncio.get_running_loop().create_future(),
        )
        self._kept[worker.worker_id] = kept
        remark = ignored(config.placement)
        if remark is not None:
            self._bus.emit(EngineDoubted(f"workers.{worker.worker_id[1:]}.launch.placement", remark))
        self._tasks.spawn(f"launch:{worker.worker_id}", self._keep(kept))

    def restart(self, worker: Worker) -> None:
        """End a worker's process at once, to be started again as any that ends; nothing where it has none of ours."""
        kept = self._kept.get(worker.worker_id)
        if kept is not None and kept.process is not None:
            kept.process.kill()

    def hold(self) -> None:
        """Start nothing any more: the service stops."""
        self._held = True

    async def close(self, deadline: float) -> None:
        """End every process until `deadline` (loop time); idempotent."""
        self.hold()
        await self._launcher.close(deadline)

    def _removed(self, worker: Worker) -> None:
        kept = self._kept.pop(worker.worker_id, None)
        if kept is not None and not kept.leaving.done():
            kept.leaving.set_result(None)

    # -- one worker ------------------------------------------------------------------------------------------

    async def _keep(self, kept: _Kept) -> None:
        try:
            await self._keep_alive(kept)
        finally:
            if kept.leaving.done() or kept.launched.over:
                await _release(kept)

    async def _keep_alive(self, kept: _Kept) -> None:
        worker = kept.worker
        while True:
            process, how = await self._live(kept)
            if kept.leaving.done():
                return
            if self._held or worker.state is WorkerState.DRAINING:
                self._supervisor.lost(worker, f"its process {how}{kept.launched.where}")
                return
            wait_s = await self._ended(kept, how, process)
            async with worker.switching:  # what was done to the process that is gone is not in force any more
                worker.renewed(asyncio.get_running_loop().time())
            if wait_s is None:
                return
            await asyncio.wait({kept.leaving}, timeout=wait_s)
            if process is not None:  # what it left behind may hold the device or the port
                await asyncio.wait({process.ended}, timeout=_KILLED_S)
            if kept.leaving.done() or self._held:
                return
            if worker.state is WorkerState.DEAD:
                worker.become(WorkerState.STARTING, "its process is started again")

    async def _live(self, kept: _Kept) -> tuple[Process | None, str]:
        """Start a process and wait for its end, or end it where its worker was removed; returns it and how it ended."""
        worker, launched = kept.worker, kept.launched
        try:
            placed = await environment(kept.config.placement, self._groups)
            if kept.leaving.done() or self._held:  # a cluster may take its time
                return None, "was not started any more"
            seat = kept.seat = await self._seated(kept)
            if seat is None or kept.leaving.done() or self._held:
                return None, "was not started any more"
            url = self._url(kept.config, seat, worker)
            if url != worker.endpoint.url:
                worker.move(url)
            launched.log = _log(kept.config, seat, worker.worker_id)
            process = await seat.start(_launch(kept.config, placed, seat, url, launched.log))
        except LaunchFailed as failure:
            return None, f"could not be started: {failure}"
        kept.process = process
        launched.began(process.pid)
        worker.attention.set()
        self._bus.emit(EngineStarted(worker.worker_id, process.pid, url, launched.log, launched.starts))
        waited: set[asyncio.Future[Any]] = {process.gone, kept.leaving}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if kept.leaving.done():
            await _end(process)
        launched.pid = kept.process = None
        return process, how_it_ended(process.gone.result() if process.gone.done() else None)

    async def _seated(self, kept: _Kept) -> Seat | None:
        """Get a place, which may take as long as the start; None where the worker was removed meanwhile."""
        worker = kept.worker

        def tell(words: str) -> None:
            if worker.absent and not kept.leaving.done():
                worker.reason = words

        asking = asyncio.ensure_future(self._launcher.seat(worker.worker_id, kept.config, tell))
        waited: set[asyncio.Future[Any]] = {asking, kept.leaving}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
        if not asking.done():
            await asyncio.wait({asking}, timeout=_KILLED_S)
        return None if asking.cancelled() or not asking.done() else asking.result()

    async def _ended(self, kept: _Kept, how: str, process: Process | None) -> float | None:
        """Take the worker out, and say so; returns the seconds until the restart, or None where there is none."""
        worker, launched, config = kept.worker, kept.launched, kept.config
        kept.proved = kept.proved or launched.answered
        wait_s = kept.restarts.ended(asyncio.get_running_loop().time(), proved=kept.proved)
        launched.over = wait_s is None
        reason = f"its process {how}{launched.where}"
        if wait_s is not None:
            reason += f"; it is started again in {wait_s:.1f} s"
        elif kept.proved:
            reason += f"; its {config.restarts} restarts in {config.restart_window_s:g} s are used up"
        else:
            reason += "; it has never answered, so it is not started again"
        if launched.answered:
            self._supervisor.lost(worker, reason)
        else:
            launched.last_words = "" if process is None else await process.last_words()
            if kept.proved or wait_s is None:
                self._supervisor.lost(worker, reason)
            else:  # the start still waits for it
                worker.reason = reason
        self._bus.emit(EngineExited(worker.worker_id, how, launched.log, wait_s, launched.last_words))
        return wait_s

    def _url(self, config: LaunchConfig, seat: Seat, worker: Worker | None) -> str:
        port = config.port
        if port == "auto":
            workers = (other for other in self._pool.workers.values() if other is not worker)
            others = {_port(place) for other in workers for place in (other.endpoint, *other.engines)}
            before = None if worker is None else _port(worker.endpoint)
            host = seat.host or config.host
            port = choose_port(before, others, lambda free: seat.is_free(host, free), self._rng, seat.ports)
        return config.url_at(port, seat.host)


def _port(place: Endpoint) -> int | None:
    return urlsplit(place.url).port


def _launch(config: LaunchConfig, placed: dict[str, str], seat: Seat, url: str, log: str) -> Launch:
    env = {"PYTHONUNBUFFERED": "1", **config.env, **placed}  # a log that is behind is no help
    return Launch(config.command_at(urlsplit(url).port, seat.host, seat.python), env, Path(log))


def _log(config: LaunchConfig, seat: Seat | None, worker_id: str) -> str:
    """Where the log goes: as configured, else where the seat keeps logs, else below this folder; empty: not known."""
    if config.log_dir is None and seat is None:
        return ""
    if config.log_dir is None and seat is not None and seat.log_folder is not None:
        return str(seat.log_folder / f"{seat.log_prefix}{worker_id}.log")
    return str(Path(config.log_folder).absolute() / f"{worker_id}.log")


async def _end(process: Process) -> None:
    process.ask()
    await asyncio.wait({process.ended}, timeout=_GRACE_S)
    process.kill()
    await asyncio.wait({process.ended}, timeout=_KILLED_S)


async def _release(kept: _Kept) -> None:
    if kept.seat is not None:
        await kept.seat.release()
