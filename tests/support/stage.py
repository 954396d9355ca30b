"""A `RolloutService` in this process, small, watched all along, and proved clean at its end.

- The ledger is checked at every event, and recounted over live groups whenever a test waits or takes a batch.
- At the end nothing is left: no task, no connection, no judge process, no tensor, and the gate is closed.
- A component that died fails the test, unless the test said that one would.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from aiohttp import BaseConnector

from rollout_svc import events
from rollout_svc.assembly import Parts
from rollout_svc.buffer.storage import Storage
from rollout_svc.config import Config, Portion
from rollout_svc.configfile import config_from_mapping
from rollout_svc.engines import HttpTransport
from rollout_svc.events import ComponentDied, Event, EventBus
from rollout_svc.gate import LANES
from rollout_svc.group import Group
from rollout_svc.ledger import SETTLED, Ledger
from rollout_svc.outside import Outside
from rollout_svc.pause.report import PauseReport
from rollout_svc.recovery import Restore
from rollout_svc.service import RolloutService
from rollout_svc.tensors import Threads
from rollout_svc.workers.placement import Groups
from rollout_svc.workers.worker import Worker
from tests.support.bell import WAIT_S, Bell
from tests.support.face import Face

__all__ = ["PROMPT", "SLACK_S", "Stage", "lines", "make_config", "stage"]

PROMPT = [11, 12, 13]
"""Token ids every prompt of `lines` begins with."""
SLACK_S = 0.1
"""Real time, in seconds, by which a pause may exceed its deadline."""
TASK = "t"
EVENTS = tuple(
    kind
    for name in events.__all__
    if isinstance(kind := getattr(events, name), type) and issubclass(kind, Event) and kind is not Event
)
E = TypeVar("E", bound=Event)


def lines(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Make prompt lines with ids of their own: `p0`, `p1`, …; the last token is the number."""
    return [{"id": f"p{n}", "input_ids": [*PROMPT, n], "ground_truth": n} for n in range(first, first + count)]


def make_config(*engines: Face | str | Mapping[str, Any], **sections: Any) -> Config:
    """Make a small configuration.

    Args:
        engines: fakes, urls, or mappings with the keys of a worker.
        sections: whole sections; `trainer`, `pause` and `producer` are laid over small numbers; `prompts`, `judger`,
            `agent`, `sampling` are those of the one task `t`.
    """
    workers = [
        {"url": engine.url} if isinstance(engine, Face) else {"url": engine} if isinstance(engine, str) else engine
        for engine in engines
    ]
    task = {
        "name": TASK,
        "prompts": {"push": True},
        "agent": {"name": "single_turn"},
        "judger": {"path": "tests.support.judges:Judge"},
        "sampling": {"max_tokens": 16},
    }
    task |= {key: sections.pop(key) for key in ("prompts", "judger", "agent", "sampling") if key in sections}
    trainer = {"train_batch_size": 4, "prompt_repeat_k": 1, "over_sample_threshold": 0.0, "max_staleness": 1}
    pause = {"deadline_s": 2.0, "abort_interval_s": 0.2, "quarantine_s": 30.0}
    data: dict[str, Any] = {
        "service": {"port": 0},
        "workers": workers,
        "start_timeout_s": WAIT_S,
        "tasks": sections.pop("tasks", [task]),
        "trainer": trainer | sections.pop("trainer", {}),
        "pause": pause | sections.pop("pause", {}),
        "producer": {"strategy": "disaggregated"} | sections.pop("producer", {}),
    }
    return config_from_mapping(data | sections)


def _outside(
    storage: Storage | None,
    transport: Callable[[], HttpTransport] = HttpTransport,
    threads: Threads | None = None,
    groups: Groups | None = None,
) -> Outside:
    outside = Outside(transport=transport) if storage is None else Outside(transport=transport, storage=lambda: storage)
    if groups is not None:
        outside = replace(outside, groups=lambda _: groups)
    return outside if threads is None else replace(outside, threads=lambda: threads)


class Stage:
    """The service and what a test does to it."""

    def __init__(
        self,
        config: Config,
        outside: Outside | None = None,
        restore: Restore | None = None,
        portion: Portion | None = None,
    ) -> None:
        bus, rng = EventBus(on_error=self._broken), Random(os.getpid())
        self.service = RolloutService(config, bus=bus, rng=rng, outside=outside, restore=restore, portion=portion)
        self.bell = Bell()
        self.events: list[Event] = []
        self.may_die = False
        self.faults: list[str] = []
        for kind in EVENTS:
            bus.subscribe(kind, self._happened)

    def __repr__(self) -> str:
        return f"<Stage {self.service.state} {self.parts.ledger}>"

    def _happened(self, event: Event) -> None:
        self.events.append(event)
        if self.service._parts is not None:
            self.parts.ledger.check()
            self.parts.evaluations.ledger.check()
        self.bell.ring()

    def _broken(self, event: Event, error: Exception) -> None:
        self.faults.append(f"at {event}: {error}")

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Parts:
        """The parts of the service."""
        return self.service.parts

    @property
    def judge(self) -> Any:
        """The judger of the task."""
        return self.service.prepared.runtimes[TASK].desk._judger

    @property
    def agent(self) -> Any:
        """The agent loop of the task."""
        return self.service.prepared.runtimes[TASK].agent

    @property
    def source(self) -> Any:
        """The prompt source of the task."""
        return self.service.prepared.sources[TASK]

    def worker(self, index: int = 0) -> Worker:
        """A worker, by its place in the configuration."""
        return self.parts.pool.workers[f"w{index}"]

    def samples(self, account: str) -> int:
        """Samples in an account of the ledger."""
        count: int = self.parts.ledger.as_json()["samples"][account]
        return count

    def groups(self, account: str) -> int:
        """Groups in an account of the ledger."""
        count: int = self.parts.ledger.as_json()["groups"][account]
        return count

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def live_groups(self) -> list[Group]:
        """Every group of training that is admitted and not settled, wherever it is."""
        buffer = self.parts.buffer
        found = [run.group for run in self.parts.rollouts._runs.values() if run.host is None]
        found += [*buffer._unfinished.values(), *buffer._ready.values()]
        return found + [group for lease in buffer.leases for group in lease.groups]

    def audit(self) -> None:
        """Check the ledgers, and count the live groups and samples of each lane again."""
        if self.service._parts is None:
            return
        evaluations = self.parts.evaluations
        of_eval = [group for e in evaluations._open.values() for group in e.groups if not group.settled]
        running = {group.group_id for group in of_eval if group.account == "in_flight"}
        assert running == {run.group.group_id for run in self.parts.rollouts._runs.values() if run.host is not None}
        self._recount(evaluations.ledger, of_eval)
        self._recount(self.parts.ledger, self.live_groups())

    @staticmethod
    def _recount(ledger: Ledger, live: Sequence[Group]) -> None:
        ledger.check()
        assert len({group.group_id for group in live}) == len(live), "a group is in two places"
        for unit, found in (
            ("groups", Counter(str(group.account) for group in live)),
            ("samples", Counter(str(sample.account) for group in live for sample in group.samples)),
        ):
            booked = {name: n for name, n in ledger.as_json()[unit].items() if n and name not in {*SETTLED, "admitted"}}
            assert dict(found) == booked, f"{unit}: {dict(found)} are there, {booked} are booked"

    # -- doing -----------------------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], bool], what: str = "", timeout_s: float = WAIT_S) -> None:
        """Wait until `holds()`, looking again at every change, with the books checked each time."""

        def look() -> bool:
            self.audit()
            return holds()

        try:
            await self.bell.until(look, what, timeout_s)
        except AssertionError as error:
            runs = list(self.parts.rollouts._runs.values())
            workers = list(self.parts.pool.workers.values())
            raise AssertionError(f"{error}; {self.parts.ledger.as_json()}; {runs}; {workers}") from None

    async def push(self, prompts: int | Sequence[Mapping[str, Any]], first: int = 0) -> int:
        """Push prompts; a number makes that many."""
        given = lines(prompts, first) if isinstance(prompts, int) else list(prompts)
        return (await self.service.put_prompts(TASK, given))["accepted"]

    async def take(self, step: int = 0, groups: int = 1, timeout_s: float = WAIT_S, **rest: Any) -> dict[str, Any]:
        """Take a batch."""
        batch = await self.service.take_batch(step, groups, timeout_s, **rest)
        self.audit()
        return batch

    async def evaluate(self, prompts: int | Sequence[Any] = 1, timeout_s: float = WAIT_S, **how: Any) -> list[Any]:
        """Have prompts evaluated; a number makes that many. Returns the record of each one's sample."""
        given = lines(prompts, first=90) if isinstance(prompts, int) else list(prompts)
        answer = await self.service.evaluate(TASK, given, timeout_s=timeout_s, **how)
        self.audit()
        return [sample for group in answer["groups"] for sample in group["samples"]]

    async def pause(self, deadline_s: float | None = None, **rest: Any) -> PauseReport:
        """Pause, and check that it came back in time."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        report = await self.service.pause(deadline_s=deadline_s, **rest)
        limit = self.service.config.pause.deadline_s if deadline_s is None else deadline_s
        assert loop.time() - started <= limit + SLACK_S
        self.audit()
        return report

    async def resume(self, **arguments: Any) -> dict[str, Any]:
        """Resume."""
        status = await self.service.resume(**arguments)
        self.audit()
        return status

    def start(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a call beside the test; the test awaits or cancels it."""
        return asyncio.get_running_loop().create_task(coroutine)


@asynccontextmanager
async def stage(
    *engines: Face | str | Mapping[str, Any],
    pushed: int = 0,
    ready: bool = True,
    storage: Storage | None = None,
    transport: Callable[[], HttpTransport] = HttpTransport,
    restore: Restore | None = None,
    threads: Threads | None = None,
    groups: Groups | None = None,
    portion: Portion | None = None,
    **sections: Any,
) -> AsyncIterator[Stage]:
    """Run a service over engines.

    Args:
        engines: see `make_config`.
        pushed: prompts that are there from the start.
        ready: wait until the gate is open.
        storage: where groups are made durable.
        transport: makes what carries calls to engines.
        restore: a snapshot to go on from.
        threads: where heavy work is done.
        groups: knows Ray's placement groups.
        portion: of a shard, which is held.
        sections: see `make_config`.
    """
    before = _tasks()
    made = Stage(make_config(*engines, **sections), _outside(storage, transport, threads, groups), restore, portion)
    service = made.service
    parts: tuple[Any, ...] = (made.judge, made.agent, storage)
    for part in parts:
        if hasattr(part, "bell"):
            part.bell = made.bell
    for engine in engines:
        if isinstance(engine, Face):
            engine.listeners.append(made.bell.ring)
    await service.start()
    for listens in (made.parts.pool, made.parts.rollouts, made.parts.buffer, made.parts.gate):
        listens.subscribe(made.bell.ring)
    carrier = made.parts.transport
    assert isinstance(carrier, HttpTransport)
    connectors = [carrier._data.connector, carrier._control.connector]
    try:
        if pushed:
            await made.push(pushed)
        if ready:
            await service.ready()
        yield made
        made.audit()
    finally:
        await service.stop()
    assert not made.faults, made.faults
    assert made.may_die or not made.of(ComponentDied), made.of(ComponentDied)
    _assert_nothing_left(made, connectors, before)


def _assert_nothing_left(
    made: Stage, connectors: Sequence[BaseConnector | None], before: set[asyncio.Task[Any]]
) -> None:
    parts = made.parts
    parts.ledger.check()
    assert not parts.evaluations.ledger.unsettled_groups
    assert not parts.evaluations.generating
    assert not parts.tasks.live
    left = _tasks() - before - {asyncio.current_task()}
    assert not left, left
    for connector in connectors:
        assert connector is not None
        assert connector.closed
        assert not connector._conns
        assert not connector._acquired
    assert not any(parts.gate.is_open(lane) for lane in LANES)
    assert not any(parts.pool.in_flight.values())
    assert not any(worker.tokens for worker in parts.pool.workers.values())
    assert getattr(parts.processes, "_pool", None) is None
    assert not parts.judging.calls
    assert not parts.handles.live  # P27
    assert not parts.handles.lost


def _tasks() -> set[asyncio.Task[Any]]:
    """Every task of the loop but those of the fakes' HTTP servers, which are not the service's."""
    return {
        task for task in asyncio.all_tasks() if "RequestHandler" not in getattr(task.get_coro(), "__qualname__", "")
    }
