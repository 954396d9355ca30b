"""The producing loop, in virtual time: no source holds it up, and when every group fails it hardly admits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import MemoryStorage, Position
from rollout_svc.config import TrainerConfig
from rollout_svc.events import (
    EventBus,
    GroupAdmitted,
    GroupFinished,
    GroupSettled,
    ProducerWaiting,
    SampleFailed,
    SourceSkips,
)
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.plan import Plan
from rollout_svc.producer.caution import LIMIT
from rollout_svc.producer.lines import PromptLine
from rollout_svc.producer.loop import Producer
from rollout_svc.producer.sources import PromptSource, PushSource
from rollout_svc.producer.tail import Tail
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.tokens import TextCodec
from rollout_svc.workers.pool import WorkerPool
from tests.support.stage import lines
from tests.support.virtual import VirtualLoop, soon, virtual

REQUIRED = 16


class Runs:
    """Groups that end as they are told, after 10 ms."""

    def __init__(self, bus: EventBus) -> None:
        self.generating = 0
        self.keeps_partials = lambda _: True
        self.runs: Callable[[Any], list[Any]] = lambda _: []
        self.fate: Callable[[Group], str | None] = lambda _: None
        self.bus = bus
        self.started: list[tuple[float, Group]] = []

    def start(self, group: Group, runtime: Any) -> None:
        loop = asyncio.get_running_loop()
        self.started.append((loop.time(), group))
        self.generating += 1
        group.start()
        loop.call_later(0.01, self._end, group, group.hand_backs)

    def _end(self, group: Group, turn: int) -> None:
        self.generating -= 1
        if group.hand_backs != turn:
            return
        reason = self.fate(group)
        if reason is None:
            self.bus.emit(GroupFinished(group.group_id, group.prompt.task, 0.01))
        group.settle("failed" if reason else "expired", reason or "stale")
        self.bus.emit(GroupSettled(group.group_id, group.prompt.task, group.account, group.reason))


class Silent:
    """A source that has nothing to give, now or ever, and does not say that it ends."""

    exhausted = False
    skips = 0
    position = Position(0)

    def __init__(self) -> None:
        self.closed = False

    def restore(self, position: Position) -> None:
        """It stands nowhere."""

    def open(self, wake: Callable[[], None]) -> None:
        """Never wakes anybody."""

    def close(self) -> None:
        self.closed = True

    def as_json(self) -> dict[str, Any]:
        return {}

    def peek(self) -> PromptLine | None:
        return None

    def advance(self) -> Position:
        raise AssertionError("there was nothing to use up")


class Ending(Silent):
    """A source that ends when it is told to."""

    def open(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def end(self) -> None:
        self.exhausted = True
        self.wake()


class Stand:
    """A producer, and what surrounds it."""

    def __init__(self, sources: Mapping[str, PromptSource]) -> None:
        self.bus, self.gate, self.buffer = EventBus(), Gate(is_open=True), ReplayBuffer()
        self.ledger, self.tally = Ledger(), Tally()
        self.runs = Runs(self.bus)
        self.events: list[Any] = []
        for kind in (ProducerWaiting, SampleFailed, GroupAdmitted, GroupSettled, SourceSkips):
            self.bus.subscribe(kind, self.events.append)
        storage = MemoryStorage()
        runtime = cast("TaskRuntime", SimpleNamespace(weight=1.0, max_groups=None))
        self.producer = Producer(
            gate=self.gate,
            pool=cast("WorkerPool", SimpleNamespace(in_traffic=1, workers={})),
            rollouts=cast("Rollouts", self.runs),
            buffer=self.buffer,
            ledger=self.ledger,
            bus=self.bus,
            codec=TextCodec(None),
            tally=self.tally,
            storage=storage,
            settling=Settling(tally=self.tally, bus=self.bus, storage=storage),
            runtimes=dict.fromkeys(sources, runtime),
            sources=sources,
            strategy="disaggregated",
            tail=Tail(None, 1),
            new_id=lambda: uuid.uuid4().hex,
        )
        self.buffer.subscribe(self.producer.wake)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def stand(**sources: PromptSource) -> AsyncIterator[Stand]:
    made = Stand(sources)
    task = asyncio.get_running_loop().create_task(made.producer.run())
    trainer = TrainerConfig(train_batch_size=500, prompt_repeat_k=1, max_staleness=1)
    made.producer.follow(Plan(1, REQUIRED, REQUIRED, 1.0, 1000), trainer)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait({task})
    made.ledger.check()


def pushed(count: int) -> PushSource:
    source = PushSource(refused={})
    source.push(lines(count))
    return source


@virtual
async def test_a_silent_source_holds_up_nobody() -> None:
    """Other tasks' prompts are admitted, and aborted groups go on, while a source has nothing to give."""  # P33
    silent, source = Silent(), pushed(2)
    async with stand(silent=silent, other=source) as made:
        await soon(20)
        assert [group.prompt.task for _, group in made.runs.started] == ["other"] * 2
        assert len(source) == 0
        [group] = [group for _, group in made.runs.started[:1]]
        group.hand_back(not_before=5.0)
        made.buffer.put_back(group)
        await asyncio.sleep(5.0)
        await soon(20)
        assert made.runs.started[-1] == (5.0, group)
        source.push(lines(1, first=9))
        await soon(20)
        assert made.runs.started[-1][1].prompt.prompt_id == "p9"
    assert silent.closed


@virtual
async def test_a_rest_that_ends_between_a_look_and_the_timer_is_over() -> None:
    """P10: time passes while the producer looks: a group whose rest ends just then goes on all the same."""
    async with stand(source=pushed(1)) as made:
        await soon(20)
        ((_, group),) = made.runs.started
        loop, asked = cast("VirtualLoop", asyncio.get_running_loop()), made.buffer.rests_until

        def late() -> float | None:
            at = asked()
            if at is not None:
                loop.pass_until(at + 1e-6)
            return at

        cast("Any", made.buffer).rests_until = late
        made.runs.generating -= 1
        group.hand_back(not_before=5.0)
        made.buffer.put_back(group)
        await asyncio.sleep(20.0)
        assert [started is group for _, started in made.runs.started] == [True, True]


@virtual
async def test_an_end_is_told_to_whoever_waits() -> None:
    """When the last source ends, those who wait for a batch look again: no group has to finish first."""  # P22
    ending = Ending()
    async with stand(ending=ending) as made:
        await soon(20)
        told: list[bool] = []
        made.buffer.subscribe(lambda: told.append(made.producer.exhausted))
        assert not made.producer.exhausted
        ending.end()
        assert told == [True]


@virtual
async def test_when_every_group_fails_new_prompts_rest() -> None:
    """After failures in a row the position moves one prompt per rest, said once, and the reason is shown."""  # P18
    source = pushed(1000)
    async with stand(t=source) as made:
        made.runs.fate = lambda _: "judge_error"
        await asyncio.sleep(0.1)
        at_once = 1000 - len(source)
        assert LIMIT <= at_once <= LIMIT + REQUIRED
        assert made.producer.waiting == "every_group_fails"
        await asyncio.sleep(60.0)
        trials = [at for at, _ in made.runs.started[at_once:]]
        assert [round(after - before) for before, after in pairwise(trials)] == [1, 2, 4, 8, 16]
        waits = [event for event in made.of(ProducerWaiting) if event.reason == "every_group_fails"]
        assert [event.detail for event in waits] == ["judge_error"]


@virtual
async def test_the_first_group_that_finishes_ends_it() -> None:
    """A trial that finishes lets everything go on at once; another spell is said again."""  # P18
    source = pushed(200)
    async with stand(t=source) as made:
        made.runs.fate = lambda _: "judge_error"
        await asyncio.sleep(0.1)
        rested = len(source)
        made.runs.fate = lambda _: None
        await asyncio.sleep(0.3)
        assert len(source) == rested
        await asyncio.sleep(1.0)
        assert len(source) == 0
        made.runs.fate = lambda _: "judge_error"
        source.push(lines(100, first=500))
        await asyncio.sleep(0.4)
        waits = [event for event in made.of(ProducerWaiting) if event.reason == "every_group_fails"]
        assert len(waits) == 2
        assert len(source) > 50


@virtual
async def test_groups_under_way_go_on_in_a_time_of_caution() -> None:
    """Only new prompts rest: a group that was handed back goes on when its own rest is over."""
    source = pushed(100)
    async with stand(t=source) as made:
        made.runs.fate = lambda _: "judge_error"
        await soon(20)
        [group] = [group for _, group in made.runs.started[:1]]
        group.hand_back(not_before=0.2)
        made.buffer.put_back(group)
        made.runs.fate = lambda ended: None if ended is group else "judge_error"
        await asyncio.sleep(0.25)
        assert (0.2, group) in made.runs.started


@virtual
async def test_a_line_with_a_problem_is_admitted_and_failed() -> None:
    """It is counted, its problem is said, it leaves no content, and the next one is admitted."""
    source = pushed(1)
    source._lines.appendleft(PromptLine("s.0", problem="s.0: no good"))
    async with stand(t=source) as made:
        await soon(20)
        [failed] = made.of(SampleFailed)
        assert (failed.reason, failed.message, failed.final) == ("bad_prompt", "s.0: no good", True)
        assert [(e.outcome, e.reason) for e in made.of(GroupSettled)] == [("failed", "bad_prompt")]
        assert (made.tally.failed, made.tally.settled) == ({"bad_prompt": 1}, {"failed:bad_prompt": 1})
        assert [group.prompt.prompt_id for _, group in made.runs.started] == ["p0"]
        assert made.ledger.groups("failed") == 1


@virtual
async def test_a_source_that_reads_again_is_told() -> None:
    """A source that gets to its position by reading says how much it reads once more; the others say nothing."""
    far = Silent()
    far.skips = 7
    async with stand(far=far, near=Silent()) as made:
        await soon(20)
        assert made.of(SourceSkips) == [SourceSkips("far", 7)]
