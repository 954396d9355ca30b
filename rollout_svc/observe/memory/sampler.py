"""When memory is looked at, and who is told: at each step of the trainer's, and at least each minute.

Invariants:

- On the event loop a step costs microseconds and no I/O: files and /proc are read in a thread, one reading at a time.
- A reading that hangs, on a dead disk say, holds up neither the service nor its end: nobody waits for the thread.
- The accounts of the parts are those of the moment of the step; what a thread read of it is some milliseconds younger.
- Without a probe there are no threads and no timers, and the parts' own accounts are all there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from rollout_svc.events import BatchTaken, EventBus, MemoryGrowing, MemoryGrowthEnded, MemorySampled
from rollout_svc.observe.memory.advice import advice_on
from rollout_svc.observe.memory.probe import OWN
from rollout_svc.observe.memory.watch import Growth, MemoryWatch

__all__ = ["MemorySampler", "Reader"]

_EVERY_S: Final = 60.0  # longest time between two looks
_READ_S: Final = 10.0  # longest wait for a reading: it takes milliseconds

Accounts = Mapping[str, int]
Readings = dict[str, dict[str, int]]


class Reader(Protocol):
    """Reads processes and files; see `probe.Probe`."""

    @property
    def trouble(self) -> str:
        """Why something could not be read; empty: all could."""

    def read(self, launched: Mapping[str, int]) -> Readings:
        """Bytes by process and account; blocks."""


class MemorySampler:
    """Feeds a watch from a service's parts and a probe."""

    def __init__(
        self,
        watch: MemoryWatch,
        *,
        bus: EventBus,
        accounts: Callable[[], Accounts],
        launched: Callable[[], Mapping[str, int]],
        probe: Reader | None,
    ) -> None:
        """Begin to listen for steps.

        Args:
            watch: what judges.
            bus: where steps come from, and what is found goes.
            accounts: what the parts have now, bytes by account; cheap, called on the loop.
            launched: pids of the engines that the service started, by name.
            probe: reads processes and files; None: neither is read.
        """
        self.watch = watch
        self.step: int | None = None
        """The last step that was seen."""
        self._bus = bus
        self._accounts = accounts
        self._launched = launched
        self._probe = probe
        self._trouble = ""
        self._pids: dict[str, int] = {}
        self._due: tuple[int, Accounts] | None = None
        self._wake = asyncio.Event()
        self._reading: asyncio.Future[Readings] | None = None
        bus.subscribe(BatchTaken, self._taken)

    def __repr__(self) -> str:
        return f"<MemorySampler step {self.step}, {self.watch.verdict}>"

    @property
    def trouble(self) -> str:
        """Why something could not be read; empty: all could."""
        return self._trouble or ("" if self._probe is None else self._probe.trouble)

    def _fails(self, why: str) -> None:
        self._trouble = why

    def brief(self) -> dict[str, Any]:
        """What `status` says."""
        return {"verdict": self.watch.verdict, "growing": [growth.as_json() for growth in self.watch.growing]}

    async def run(self) -> None:
        """Look at every step, and each minute; for as long as the service lives."""
        while self._probe is not None:
            try:
                async with asyncio.timeout(_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            due, self._due = self._due, None
            readings = await self._read()
            if not readings:  # half of a record would look like a fall
                continue
            if due is not None:
                self._take(due[0], due[1], readings)
            else:
                self._look(readings)

    async def look(self) -> None:
        """Look now, between two steps; slopes stay as they are. Takes milliseconds, at most ten seconds."""
        self._look(await self._read())

    # -- looking ---------------------------------------------------------------------------------------------

    def _taken(self, event: BatchTaken) -> None:
        if event.step == self.step:
            return
        self.step = event.step
        if self._probe is None:
            self._take(event.step, self._accounts(), {})
            return
        self._due = (event.step, self._accounts())
        self._wake.set()

    async def _read(self) -> Readings:
        """What the probe reads; nothing where it takes too long. Those who ask meanwhile get the same answer."""
        if self._probe is None:
            return {}
        if self._reading is None:
            launched = dict(self._launched())
            for name in [name for name, pid in self._pids.items() if launched.get(name) != pid]:
                self.watch.forget(name)
            self._pids = launched
            self._reading = _in_a_thread(partial(self._probe.read, launched), self._fails)
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=_READ_S)
        if not done:
            return {}
        if self._reading is reading:
            self._reading = None
        return reading.result()

    def _take(self, step: int, own: Accounts, readings: Readings) -> None:
        """Record a step, and tell what is new."""
        readings = {OWN: readings.get(OWN, {}) | dict(own)} | {k: v for k, v in readings.items() if k != OWN}
        news = [self.watch.record(step, process, accounts) for process, accounts in readings.items()]
        self._tell(step)
        for one in news:
            for growth in one.growing:
                self._bus.emit(_growing(growth))
            for growth in one.ended:
                self._bus.emit(_ended(growth))

    def _look(self, readings: Readings) -> None:
        own = dict(self._accounts())
        for process, accounts in (readings | {OWN: readings.get(OWN, {}) | own}).items():
            self.watch.look(process, accounts)
        self._tell(None)

    def _tell(self, step: int | None) -> None:
        if not self._bus.wants(MemorySampled):
            return
        found = {process: self.watch.accounts(process) for process in self.watch.processes}
        accounts = {name: {key: one.bytes for key, one in rows.items()} for name, rows in found.items()}
        slopes = {
            name: {key: one.bytes_per_step for key, one in rows.items() if one.bytes_per_step is not None}
            for name, rows in found.items()
        }
        self._bus.emit(MemorySampled(step, accounts, slopes))


def _growing(growth: Growth) -> MemoryGrowing:
    return MemoryGrowing(
        growth.process,
        growth.account,
        round(growth.bytes_per_step),
        growth.bytes,
        growth.grown_bytes,
        growth.since_step,
        None if growth.of_rss is None else round(growth.of_rss, 3),
        growth.again,
        advice_on(growth.account),
    )


def _ended(growth: Growth) -> MemoryGrowthEnded:
    return MemoryGrowthEnded(growth.process, growth.account, growth.bytes, growth.grown_bytes, growth.since_step)


def _in_a_thread(read: Callable[[], Readings], trouble: Callable[[str], None]) -> asyncio.Future[Readings]:
    """Read in a thread that nobody waits for at the end of the process: a disk that hangs would hold it.

    An error is told to `trouble`, in that thread, and nothing was read then.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Readings] = loop.create_future()

    def settle(readings: Readings) -> None:
        if not future.done():
            future.set_result(readings)

    def work() -> None:
        try:
            readings = read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next reading must not wait for this one
            trouble(f"{type(error).__name__}: {error}")
            readings = {}
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(settle, readings)

    threading.Thread(target=work, name="memory-probe", daemon=True).start()
    return future
