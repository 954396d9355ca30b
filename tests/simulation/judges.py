"""Simulated judgers: every verdict is a number of its own, so that a reward tells which call it came from.

Invariant: a verdict that a pause took back is void; whoever finds its number in a sample has found a bug.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.judging import JudgedSample
from tests.simulation.faults import JUDGE
from tests.simulation.world import World, current

__all__ = ["GroupJudge", "SampleJudge", "Verdict"]

_SWALLOWED_S: Final = 3.0  # seconds a judge goes on after it was cancelled


class Verdict:
    """One call of a judger, and what it says of each sample."""

    __slots__ = ("done", "ids", "number", "void")

    def __init__(self, number: int, ids: dict[str, list[int]]) -> None:
        self.number = number
        self.ids = ids
        self.void = False
        self.done = False


async def _judge(world: World, samples: list[JudgedSample]) -> Verdict:
    verdict = Verdict(len(world.verdicts), {sample.sample_id: list(sample.response_ids) for sample in samples})
    world.verdicts.append(verdict)
    world.say("judge", "begins", verdict.number, samples[0].sample_id[-8:])
    fault = world.faults.draw(JUDGE)
    strike = world.faults.strike(fault) if fault is not None else None
    try:
        if fault == "judge_slow":
            await world.at_most(world.rng.uniform(0.5, 2.5))
        elif fault == "judge_hung":
            await world.at_most(3600.0)
        elif fault == "judge_swallowing":
            await _unmoved(world)
        elif fault == "judge_raising":
            await world.ambush()
        else:
            await asyncio.sleep(world.rng.uniform(0.001, 0.2))
        if fault == "judge_raising":
            raise ValueError("this judge raises")
    finally:
        verdict.done = True
        if strike is not None:
            strike.end()
    world.say("judge", "says", verdict.number, "void" if verdict.void else "")
    return verdict


async def _unmoved(world: World) -> None:
    """Wait, and take no notice of being cancelled."""
    end = world.now + world.rng.uniform(0.5, 4.0)
    for _ in range(4):
        try:
            await world.at_most(max(0.0, end - world.now))
        except asyncio.CancelledError:
            end = max(end, world.now + world.rng.uniform(0.0, _SWALLOWED_S))
        else:
            return


class SampleJudge:
    """Judges one sample."""

    async def judge(self, sample: JudgedSample) -> float:
        """Give its number."""
        return float((await _judge(current(), [sample])).number)


class GroupJudge:
    """Judges a whole group."""

    async def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        """Give its number to each."""
        return [float((await _judge(current(), samples)).number)] * len(samples)
