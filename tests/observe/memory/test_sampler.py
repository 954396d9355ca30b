"""When memory is looked at: at steps and each minute, never on the loop, and never in anybody's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rollout_svc.events import BatchTaken, Event, EventBus, MemoryGrowing, MemoryGrowthEnded, MemorySampled
from rollout_svc.observe.memory import sampler
from rollout_svc.observe.memory.sampler import MemorySampler
from rollout_svc.observe.memory.watch import MemoryWatch
from rollout_svc.tasks import TaskOwner
from tests.support.bell import Bell
from tests.support.virtual import virtual

MB = 10**6


class Readings:
    """A reader that gives what it is told, and hangs where it is told."""

    def __init__(self) -> None:
        self.trouble = ""
        self.values: dict[str, dict[str, int]] = {"service": {"rss": 500 * MB}}
        self.asked: list[dict[str, int]] = []
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def read(self, launched: Mapping[str, int]) -> dict[str, dict[str, int]]:
        self.asked.append(dict(launched))
        self.go.wait(20)
        if self.error is not None:
            raise self.error
        return self.values


class Watched:
    """A sampler on a bus, and what it was told and tells."""

    def __init__(self, reader: Readings | None) -> None:
        self.bus, self.bell, self.reader = EventBus(), Bell(), reader
        self.own: dict[str, int] = {"replay_buffer": 0}
        self.launched: dict[str, int] = {}
        self.events: list[Event] = []
        self.tasks = TaskOwner()
        self.sampler = MemorySampler(
            MemoryWatch(),
            bus=self.bus,
            accounts=lambda: dict(self.own),
            launched=lambda: dict(self.launched),
            probe=reader,
        )
        for kind in (MemorySampled, MemoryGrowing, MemoryGrowthEnded):
            self.bus.subscribe(kind, self._told)
        if reader is not None:
            self.tasks.spawn("memory", self.sampler.run())

    def _told(self, event: Any) -> None:
        self.events.append(event)
        self.bell.ring()

    def steps(self) -> list[int | None]:
        return [event.step for event in self.events if isinstance(event, MemorySampled)]

    def take(self, step: int) -> None:
        self.bus.emit(BatchTaken(f"b{step}", step, 1, 1, 0.0, {}))

    async def taken(self, step: int) -> None:
        self.take(step)
        await self.bell.until(lambda: step in self.steps(), f"step {step}")

    async def end(self) -> None:
        assert not await self.tasks.close(asyncio.get_running_loop().time() + 5)


async def test_each_step_is_recorded_once() -> None:
    """A new step is looked at, with what the parts have at that moment; the same step again is not."""  # P30
    made = Watched(Readings())
    for step in range(3):
        made.own["replay_buffer"] = 10 + step
        await made.taken(step)
        made.take(step)
    await made.taken(7)
    assert made.steps() == [0, 1, 2, 7]
    account = made.sampler.watch.accounts("service")["replay_buffer"]
    assert (account.first_bytes, account.bytes) == (10, 12)
    assert made.sampler.step == 7
    await made.end()


async def test_growth_is_told_once_with_what_to_do_and_its_end_too() -> None:
    """A leak is an event with its account, slope and advice; so is its end; `status` has it meanwhile."""  # P30
    made = Watched(Readings())
    for step in range(80):
        made.own["handles.experts"] = MB * min(step, 35)
        await made.taken(step)
        if step == 30:
            [growth] = made.sampler.brief()["growing"]
            assert (growth["account"], growth["process"]) == ("handles.experts", "service")
    first, *more = [event for event in made.events if isinstance(event, MemoryGrowing)]
    assert (first.account, first.again) == ("handles.experts", False)
    assert "memory.debug" in first.advice
    assert [event.again for event in more] == [True]
    [end] = [event for event in made.events if isinstance(event, MemoryGrowthEnded)]
    assert (end.account, end.bytes) == ("handles.experts", 35 * MB)
    assert made.sampler.brief() == {"verdict": "nothing grows: seen over the last 20 steps", "growing": []}
    await made.end()


async def test_it_looks_each_minute_where_no_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps the accounts are renewed once a minute (here: 20 ms), and no slope is made of that."""
    assert sampler._EVERY_S == 60
    monkeypatch.setattr(sampler, "_EVERY_S", 0.02)
    made = Watched(Readings())
    await made.bell.until(lambda: len(made.steps()) == 3, "three looks")
    assert set(made.steps()) == {None}
    assert made.sampler.watch.steps("service") == 0
    await made.end()


@virtual
async def test_a_reading_that_hangs_is_in_nobodys_way() -> None:
    """Whoever asks has an answer in ten seconds, no second reading is begun, and the end does not wait."""
    reader = Readings()
    reader.go.clear()
    made = Watched(reader)
    started = asyncio.get_running_loop().time()
    await made.sampler.look()
    assert asyncio.get_running_loop().time() - started <= 11
    made.take(1)
    await asyncio.sleep(60)
    assert len(reader.asked) == 1
    assert made.sampler.watch.steps("service") == 0
    assert made.sampler.brief()["verdict"].startswith("too early")
    await made.end()
    reader.go.set()


async def test_a_reading_that_fails_is_told_and_the_next_one_works() -> None:
    """Half of a record would look like a fall, so that step has none; why is in the record of memory."""
    reader = Readings()
    made = Watched(reader)
    reader.error = AttributeError("half imported")
    await made.sampler.look()
    assert made.sampler.trouble == "AttributeError: half imported"
    reader.error = None
    await made.taken(1)
    assert made.sampler.watch.steps("service") == 1
    await made.end()


async def test_those_who_ask_at_once_share_a_reading() -> None:
    """Ten who ask at the same time cost one reading."""
    reader = Readings()
    made = Watched(reader)
    await asyncio.gather(*(made.sampler.look() for _ in range(10)))
    assert len(reader.asked) == 1
    await made.end()


async def test_another_process_of_the_same_name_begins_anew() -> None:
    """An engine that was started again has no past: what the one before it had is forgotten."""
    reader = Readings()
    made = Watched(reader)
    made.launched = {"engine w0": 11}
    reader.values = {"service": {"rss": 1}, "engine w0": {"rss": 900}}
    await made.taken(0)
    assert made.sampler.watch.accounts("engine w0")["rss"].first_bytes == 900
    made.launched = {"engine w0": 12}
    reader.values = {"service": {"rss": 1}, "engine w0": {"rss": 5}}
    await made.taken(1)
    assert made.sampler.watch.accounts("engine w0")["rss"].first_bytes == 5
    assert reader.asked == [{"engine w0": 11}, {"engine w0": 12}]
    await made.end()


async def test_without_a_reader_steps_are_recorded_at_once() -> None:
    """No thread, no timer, no task: the parts' own accounts, in the turn of the step."""
    made = Watched(None)
    for step in range(30):
        made.own["handles.experts"] = 2 * MB * step
        made.take(step)
    assert made.steps() == list(range(30))
    assert [event.account for event in made.events if isinstance(event, MemoryGrowing) and not event.again] == [
        "handles.experts"
    ]
    assert not made.tasks.live
    await made.sampler.run()


async def test_a_step_costs_the_loop_less_than_a_millisecond() -> None:
    """What is done on the loop for a step, the record and its judging included: a millisecond at the median."""
    made = Watched(None)
    made.own |= {f"handles.{place}": 10**8 + place for place in range(16)}
    costs = []
    for step in range(120):
        started = time.perf_counter()
        made.take(step)
        costs.append(time.perf_counter() - started)
    assert sorted(costs)[60] < 1e-3
