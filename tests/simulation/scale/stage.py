"""A service in virtual time over a fleet of any size, and the meter of what its loop does.

Invariants:

- The service is the real one, from its configuration to its stop; only sockets, processes and the clock are not.
- A request takes no file here, so that no limit of this machine on open files is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, Final, NoReturn

from bench.virtual import VirtualLoop
from rollout_svc import concurrency, limits
from rollout_svc.assembly import prepared
from rollout_svc.buffer.storage import Position
from rollout_svc.config import (
    AgentConfig,
    Config,
    JudgerConfig,
    ProducerConfig,
    PromptsConfig,
    Routing,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    WorkerConfig,
)
from rollout_svc.outside import Outside
from rollout_svc.producer.lines import PromptLine
from rollout_svc.producer.sources import PushSource
from rollout_svc.service import RolloutService
from tests.simulation.scale.fleet import Fleet, FleetTransport, url_of

__all__ = ["GROUP_SIZE", "TASK", "MeteredLoop", "Stage", "unlimited_files"]

TASK: Final = "scale"
GROUP_SIZE: Final = 8
_PLUGINS: Final = "tests.simulation.scale.plugins"
_PROMPT: Final = list(range(16))
_TURNS: Final = 2_000_000  # of the loop, in which what is waited for has to come


class MeteredLoop(VirtualLoop):
    """A virtual loop that knows how long its longest turn was, in seconds of this thread's processor time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        super().__init__()

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - began)


class _NoProcesses:
    """The judger runs in the loop: no process is ever asked for."""

    def submit(self, spec: Any, method: str, payload: Any, timeout_s: float) -> NoReturn:
        """Refuse."""
        raise AssertionError("a process was asked for")

    async def close(self) -> None:
        """Nothing to close."""


class _Endless(PushSource):
    """Prompts without end that take no memory."""

    def __init__(self) -> None:
        super().__init__(refused={})
        self._numbers = itertools.count()
        self._line = self._next()

    def _next(self) -> PromptLine:
        number = str(next(self._numbers))
        return PromptLine(number, {"id": number, "input_ids": _PROMPT, "ground_truth": [0]}, None)

    def peek(self) -> PromptLine:
        """The next prompt."""
        return self._line

    def advance(self) -> Position:
        """Use it up."""
        self._line = self._next()
        return Position(0)


@contextmanager
def unlimited_files() -> Iterator[None]:
    """Make services that ask this machine for no files."""
    before = limits.raise_open_file_limit
    setattr(prepared, "raise_open_file_limit", lambda _: 0)  # noqa: B010 - not what the module offers for change
    setattr(concurrency, "raise_open_file_limit", lambda _: 0)  # noqa: B010
    try:
        yield
    finally:
        setattr(prepared, "raise_open_file_limit", before)  # noqa: B010
        setattr(concurrency, "raise_open_file_limit", before)  # noqa: B010


def config_of(engines: int, in_flight: int, routing: Routing, agent: str | None, judger: str | None) -> Config:
    """Settings under which so many requests run on so many engines, full; agent and judger are of `plugins.py`."""
    groups = in_flight // GROUP_SIZE
    return Config(
        workers=tuple(WorkerConfig(url=url_of(number), dialect="sglang") for number in range(engines)),
        request_timeout_s=100_000.0,
        routing=routing,
        tasks=(
            TaskConfig(
                name=TASK,
                prompts=PromptsConfig(push=True),
                sampling=SamplingConfig(max_tokens=64),
                agent=AgentConfig(path=f"{_PLUGINS}:{agent}") if agent else AgentConfig(name="single_turn"),
                judger=JudgerConfig(path=f"{_PLUGINS}:{judger}") if judger else JudgerConfig(name="exact"),
            ),
        ),
        trainer=TrainerConfig(
            train_batch_size=groups,
            prompt_repeat_k=GROUP_SIZE,
            over_sample_threshold=0,
            max_batch_per_worker=max(1, -(-in_flight // engines)),
            allow_over_concurrency_ratio=1.0,
            max_staleness=1,
        ),
        producer=ProducerConfig(strategy="disaggregated"),
    )


class Stage:
    """A running service over a fleet; made within its loop."""

    def __init__(
        self,
        engines: int,
        in_flight: int,
        *,
        routing: Routing = "least_tokens",
        agent: str | None = None,
        judger: str | None = None,
    ) -> None:
        self.engines, self.in_flight = engines, in_flight
        self.fleet = Fleet(engines)
        ids = Random(0)
        with unlimited_files():
            self.service = RolloutService(
                config_of(engines, in_flight, routing, agent, judger),
                rng=Random(0),
                outside=Outside(
                    transport=lambda: FleetTransport(self.fleet),
                    processes=_NoProcesses,
                    new_id=lambda: f"{ids.getrandbits(128):032x}",
                    probes=False,
                ),
            )
        self.service.prepared.sources[TASK] = _Endless()

    async def start(self) -> None:
        """Start and wait for every engine; the gate opens with the last of them."""
        with unlimited_files():
            await self.service.start()
            await self.service.ready()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let the loop turn until something is the case.

        Raises:
            TimeoutError: it is not the case after very many turns.
        """
        for _ in range(_TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        raise TimeoutError(f"{what}: {self.service.status()}")

    async def fill(self) -> None:
        """Wait until every slot is taken."""
        pool = self.service.parts.pool
        await self.until(lambda: pool.in_flight["train"] >= self.in_flight, "not full")

    async def turn_over(self, number: int) -> None:
        """Have the oldest requests answered, and wait until as many others have begun."""
        ledger = self.service.parts.ledger
        before = ledger.samples("ready")
        self.fleet.finish(number)
        await self.until(lambda: ledger.samples("ready") >= before + number, "not answered")
        await self.fill()

    def census(self) -> Mapping[str, int]:
        """What is alive in the loop: tasks, and timers that were not cancelled."""
        loop: Any = asyncio.get_running_loop()
        timers = sum(not timer.cancelled() for timer in loop._scheduled)
        return {"tasks": len(asyncio.all_tasks()), "timers": timers}
