"""A service in this process, in the loop `serve` runs in, over engines in processes of their own.

- Thousands may be in flight: the books are checked when a test looks, not at every event.
- At its end nothing is left, by the kernel's count: no task and no descriptor. Processes are the test's to count.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final, TypeVar

from bench.process import raise_open_files
from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping
from rollout_svc.events import ComponentDied, Event, EventBus
from rollout_svc.loop import new_event_loop
from rollout_svc.pause.report import PauseReport
from rollout_svc.service import RolloutService
from tests.chaos.leaks import held
from tests.support.bell import Bell
from tests.support.stage import Stage

__all__ = ["DEADLINE_S", "GROUP_SIZE", "SLACK_S", "SMOKE", "Site", "run", "site"]

SMOKE: Final = bool(os.environ.get("CHAOS_SMOKE"))
"""Whether this is the small run."""
GROUP_SIZE: Final = 8
DEADLINE_S: Final = 5.0
SLACK_S: Final = 0.1
"""Real time, in seconds, by which a pause may exceed its deadline."""
FILL_S: Final = 60.0
"""How long a wait lasts, in seconds, before it fails the test: thousands of connections are opened meanwhile."""
T = TypeVar("T")


def make_config(urls: list[str], in_flight: int) -> Config:
    """Make a configuration that keeps `in_flight` requests under way, spread over the engines."""
    data: dict[str, Any] = {
        "service": {"port": 0},
        "workers": [{"url": url} for url in urls],
        "start_timeout_s": FILL_S,
        "tasks": [
            {
                "name": "t",
                "prompts": {"source": "bench.workload:prompts"},
                "judger": {"name": "exact"},
                "sampling": {"max_tokens": 256},
            }
        ],
        "trainer": {
            "train_batch_size": in_flight // GROUP_SIZE,
            "prompt_repeat_k": GROUP_SIZE,
            "over_sample_threshold": 0.0,
            "max_batch_per_worker": in_flight // len(urls),
            "allow_over_concurrency_ratio": 1.0,
            "max_staleness": 1,
        },
        "producer": {"strategy": "disaggregated"},
        "pause": {"deadline_s": DEADLINE_S, "quarantine_s": 30.0},
    }
    return config_from_mapping(data)


class Site(Stage):
    """A stage that looks less often."""

    def __init__(self, config: Config) -> None:
        bus = EventBus(on_error=self._broken)
        self.service = RolloutService(config, bus=bus, rng=Random(1))
        self.bell = Bell()
        self.events: list[Event] = []
        self.may_die = False
        self.faults: list[str] = []
        bus.subscribe(ComponentDied, self.events.append)

    async def until(self, holds: Callable[[], bool], what: str = "", timeout_s: float = FILL_S) -> None:
        """Wait until `holds()`, looking again at every change of a slot, a worker or a run."""
        try:
            await self.bell.until(holds, what, timeout_s)
        except AssertionError as error:
            workers = list(self.parts.pool.workers.values())
            raise AssertionError(f"{error}; {self.parts.ledger.as_json()}; {workers}") from None

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self.parts.pool.in_flight["train"]

    async def timed_pause(self) -> tuple[PauseReport, float]:
        """Pause, check that it came back in time with balanced books, and say how long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        report = await self.service.pause(deadline_s=DEADLINE_S)
        elapsed_s = loop.time() - started
        assert elapsed_s <= DEADLINE_S + SLACK_S, f"{elapsed_s:.3f} s"
        self.audit()
        for tally in report.workers.values():
            assert tally.in_flight == tally.answered + tally.cancelled
        assert self.in_flight == 0
        return report, elapsed_s


@asynccontextmanager
async def site(urls: list[str], in_flight: int, *, alone: bool = True) -> AsyncIterator[Site]:
    """Run a service over engines; at the end, check that it left nothing.

    Args:
        urls: of the engines.
        in_flight: requests it keeps under way there, together.
        alone: nobody else opens sockets in this process meanwhile, so that every one more is the service's.
    """
    before = held()
    made = Site(make_config(urls, in_flight))
    await made.service.start()
    for listens in (made.parts.pool, made.parts.rollouts, made.parts.buffer, made.parts.gate):
        listens.subscribe(made.bell.ring)
    try:
        await made.service.ready()
        yield made
        made.audit()
    finally:
        await made.service.stop()
    assert not made.faults, made.faults
    assert not made.events, made.events
    assert not made.parts.tasks.live
    assert not made.service.survivors
    await asyncio.sleep(0)  # transports that were closed give their sockets back in the next turn
    left = held() - before
    assert not left or not alone, left


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario as `serve` does: in its loop, with as many open files as the machine allows."""
    raise_open_files()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(scenario)
