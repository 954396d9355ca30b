"""Histories by seed: a short run of them, that they replay, and what the loop refuses."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from tests.simulation.campaign import digests_elsewhere, outcomes
from tests.simulation.faults import FAULTS, IMPOSSIBLE, RARE, STANDS
from tests.simulation.history import run_history
from tests.simulation.loop import LIFE, Deadlock, Livelock, SimLoop

_SEEDS = range(60)


def test_every_promise_holds_on_every_history() -> None:  # P1 P2 P3 P5 P6 P7 P8 P9 P10 P11 P13 P15 P17 P18
    """No history of a short run breaks a promise, and each is big enough to mean something."""
    for outcome in outcomes(_SEEDS, adversarial=False, digest=False, jobs=1):
        assert outcome.broken is None, f"seed {outcome.seed}: {outcome.broken}"
        assert outcome.admitted >= 16
        assert outcome.pauses >= 3


def test_a_seed_is_one_history_in_any_process() -> None:
    """Two processes with different hash seeds tell the same histories, to the last digit."""
    runs = [digests_elsewhere("0:6", hash_seed, adversarial=False) for hash_seed in (1, 2)]
    first, second = (process.communicate()[0].splitlines() for process in runs)
    assert len(first) == 6
    assert first == second


def test_an_adversarial_seed_replays_too() -> None:
    """Shuffled wake-ups follow from the seed as well."""
    first, second = (run_history(3, adversarial=True, digest=True) for _ in range(2))
    assert first.digest == second.digest


def test_what_cannot_happen_says_why() -> None:
    """A cell that may be empty is excused by its right names only, and with a reason."""
    for (fault, stand), reason in (IMPOSSIBLE | RARE).items():
        assert fault in FAULTS
        assert stand in STANDS
        assert reason


def _loop() -> SimLoop:
    return SimLoop(after_turn=lambda: None)


def test_nothing_ready_and_nothing_scheduled_is_a_deadlock() -> None:
    """A wait that nobody will end ends the history."""
    loop = _loop()
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_task(asyncio.Event().wait()))
    loop.bury()
    loop.close()


def test_turning_without_time_is_a_livelock() -> None:
    """A loop that never lets time pass ends the history."""
    loop = _loop()

    async def spin() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        loop.run_until_complete(loop.create_task(spin()))
    loop.bury()
    loop.close()


def test_a_killed_life_runs_no_line_more() -> None:
    """Neither its tasks nor their clean-up run after the kill; the world goes on."""
    loop, ran = _loop(), []

    async def live() -> None:
        try:
            await asyncio.sleep(1.0)
            ran.append("task")
        finally:
            ran.append("clean-up")

    async def world() -> list[str]:
        context = contextvars.copy_context()
        context.run(LIFE.set, 1)
        loop.create_task(live(), context=context)
        await asyncio.sleep(0.5)
        loop.kill(1)
        await asyncio.sleep(5.0)
        return list(ran)

    assert loop.run_until_complete(loop.create_task(world())) == []
    loop.bury()
    loop.close()


def test_threads_and_executors_are_refused() -> None:
    """What has a clock of its own has no place in a history."""
    loop = _loop()

    async def escape() -> None:
        await asyncio.to_thread(int)

    with pytest.raises(RuntimeError, match="executor"):
        loop.run_until_complete(loop.create_task(escape()))
    loop.bury()
    loop.close()
