"""Putting idle engines to sleep, so that somebody else has their memory, and waking them.

Invariants:

- Memory is only asked for of an engine that is idle by its own count, where it has one, and wholly awake.
- What is taken back is what is known to be given up. Where a call's fate is unknown the engine is asked; one that does
  not tell is neither woken nor used until it is another process: either guess may end it.
- One conversation at a time per worker, with freezes and thaws, so that no two calls overtake each other on the wire.
- Weights that an engine did not keep are lost from before the call on that gives them up, until it has been given some;
  or until it refused that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from rollout_svc.engines import Call, Endpoint, EngineInfo
from rollout_svc.engines.memory import TAGS, Asleep, Tag, in_order
from rollout_svc.engines.updates.protocol import Ask
from rollout_svc.errors import WorkerFailure
from rollout_svc.events import EventBus, WorkerSlept, WorkerWoken
from rollout_svc.workers.control import CONTROL_TIMEOUT_S, Control
from rollout_svc.workers.worker import Sleep, Worker, WorkerState

__all__ = ["Sleeping", "can_offload"]

_MOVE_S: Final = 120.0  # seconds for one call: a model's weights go to host memory, or come back
_MONITOR_S: Final = 15.0  # seconds for which an engine's own monitor may still call it asleep
_BACKUP: Final = "weights_backup"
_UNKNOWN: Final = "whether it gave its memory up is not known, and it does not tell: restart it"

_RESTARTED: Final = "it is another process, which is awake"


def can_offload(worker: Worker) -> bool:
    """Whether this worker's engine can give memory up, and is ours alone: it dies of it where anything runs."""
    return worker.exclusive and "offload" in worker.capabilities


class Sleeping:
    """Puts to sleep and wakes; the state is each worker's `asleep`.

    Attributes:
        lent: what sleeps is to stay asleep: a pause gave the memory to somebody.
    """

    def __init__(self, *, control: Control, bus: EventBus) -> None:
        self.lent = False
        self._control = control
        self._bus = bus

    async def offload(self, worker: Worker, tags: frozenset[Tag]) -> str | None:
        """Give memory up; returns why that was not done, or not wholly. The caller has claimed it: `worker.asleep`."""
        try:
            async with worker.switching:
                sleep = worker.asleep
                if sleep is None:
                    return "it was woken before it slept"
                reason = await self._offload(worker, sleep, tags)
                if not sleep.tags and sleep.certain and worker.asleep is sleep:
                    worker.asleep = None
        except WorkerFailure as failure:
            reason = str(failure)
        self._bus.emit(WorkerSlept(worker.worker_id, () if worker.asleep is None else worker.asleep.listed, reason))
        return reason

    async def _offload(self, worker: Worker, sleep: Sleep, tags: frozenset[Tag]) -> str | None:
        wanted = worker.dialect.offloads(tags | sleep.tags)
        if not sleep.certain:
            return _UNKNOWN
        if sleep.tags and await self._is_another(worker):
            return _RESTARTED
        if wanted <= sleep.tags:
            return None
        await self._take_back(worker, sleep, TAGS)
        if "count" in worker.capabilities and (count := await self._control.count(worker)) != 0:
            return f"it is not idle by its own count: {'unknown' if count is None else count}"
        if worker.state is not WorkerState.ACTIVE or worker.calls or worker.loading:  # it may have changed meanwhile
            return f"it is {worker.state}, and has work: {worker.reason}"
        before = worker.weights_lost
        if "weights" in wanted and _BACKUP not in worker.capabilities:
            worker.weights_lost = True
        try:
            await self._move(worker, sleep, worker.dialect.offload(wanted))
        except WorkerFailure:
            if sleep.certain:  # it refused, and has what it had
                worker.weights_lost = before
            raise
        sleep.tags |= wanted
        return None

    async def wake(self, worker: Worker, tags: Iterable[Tag] = TAGS) -> str | None:
        """Take memory back, weights first; returns why that could not be done."""
        async with worker.switching:
            sleep = worker.asleep
            if sleep is None:
                return None
            before = sleep.listed
            try:
                reason = await self._wake(worker, sleep, tags)
            except WorkerFailure as failure:
                reason = str(failure)
            if reason is None and not sleep.tags and worker.asleep is sleep:
                worker.awake(asyncio.get_running_loop().time() + _MONITOR_S)
        self._bus.emit(WorkerWoken(worker.worker_id, before, sleep.listed, reason))
        return reason

    async def _wake(self, worker: Worker, sleep: Sleep, tags: Iterable[Tag]) -> str | None:
        if await self._is_another(worker):
            return _RESTARTED
        if not sleep.certain:
            found = await self._ask(worker)
            if found is None:
                return _UNKNOWN
            sleep.tags, sleep.certain = set(found.tags), True
        await self._take_back(worker, sleep, tags)
        return None

    async def find(self, worker: Worker) -> None:
        """Ask an engine that was met whether it sleeps: maybe a service that died put it to sleep.

        How it was put to sleep most do not tell: then its weights are not believed to be what its label says.

        Raises:
            WorkerFailure: it does not answer.
        """
        if worker.asleep is not None or not can_offload(worker):
            return
        found = await self._ask(worker)
        if found is not None and found.tags and worker.asleep is None:
            worker.asleep = Sleep(set(found.tags))
            worker.weights_lost |= not found.kept
            worker.reason = f"it was found asleep: {', '.join(worker.asleep.listed)}"

    def met(self, worker: Worker, info: EngineInfo, *, other: bool = False) -> bool:
        """Whether it is another process than was put to sleep, and so awake; `other`: that is known already.

        One that was in traffic had a number for a label: another label, but that of a load under way, is a fresh one's.
        """
        fresh = worker.labels and info.weight_version is None and not info.half_loaded
        renamed = None not in (info.process, worker.process) and info.process != worker.process
        if worker.asleep is None or not (other or fresh or renamed):
            return False
        worker.asleep, worker.weights_lost = None, False
        worker.restarted("it was restarted in its sleep")
        return True

    async def _is_another(self, worker: Worker) -> bool:
        """Ask right before memory is taken back: one that was restarted since the last look would die of it."""
        return worker.state is not WorkerState.STARTING and self.met(worker, await self._control.info(worker))

    async def _take_back(self, worker: Worker, sleep: Sleep, tags: Iterable[Tag]) -> None:
        for tag in in_order(sleep.tags & frozenset(tags)):
            await self._move(worker, sleep, worker.dialect.wake(tag))
            sleep.tags.discard(tag)

    async def _move(self, worker: Worker, sleep: Sleep, calls: list[Call]) -> None:
        """Make calls of which none can be taken back; until they are answered nobody knows what holds."""
        sleep.certain = False
        try:
            await self._control.do(worker, calls, _MOVE_S)
        except WorkerFailure as failure:
            refused = failure.kind.startswith("http_4") or (failure.kind == "connection" and not failure.accepted)
            sleep.certain = refused and len(calls) == len(worker.engines) == 1
            raise
        sleep.certain = True

    async def _ask(self, worker: Worker) -> Asleep | None:
        """What its engines say; None where one does not, or they are not agreed. Raises WorkerFailure."""
        found: list[Asleep | None] = []

        async def visit(_: Endpoint, ask: Ask) -> None:
            found.append(worker.dialect.parse_asleep(await ask(worker.dialect.asleep())))

        await self._control.at_each(worker, visit, CONTROL_TIMEOUT_S)
        first = found[0] if found else None
        return first if all(other == first for other in found) else None
