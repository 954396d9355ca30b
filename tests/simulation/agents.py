"""Simulated agent loops: one with a tool that parks, and one that is slow to leave.

Invariant: what a loop writes goes through the attempt it was started with, as a well-behaved plugin's would; that
the attempt may be over by then is the point.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.errors import StaleAttempt
from rollout_svc.sample import Sample
from rollout_svc.segment import Segment
from tests.simulation.faults import AGENT
from tests.simulation.world import World, current

__all__ = ["Plain", "ToolUser", "Unruly"]

_TOOL_IDS: Final = (901, 902)
_FURTHER_TURNS: Final = (0, 0, 1, 2)  # beside the first and the last
_CLEANS_UP: Final = 0.3  # share of loops that leave something to be cleaned up
_DECLINES: Final = 0.15  # share of loops that want no routed experts of their last turn
_THINKS: Final = 0.3  # share of loops that come back from a pause with nothing left to generate


class Plain:
    """One turn."""

    on_pause: OnPause = "abort"
    one_turn = True

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Make the turn."""
        await ctx.generate(sample.prompt_ids)
        return sample


class ToolUser:
    """Two turns or more with a tool between them, and sometimes some thinking at the end; parks at a pause.

    Some of its tools are to be cleaned up after it, which takes a while.
    """

    on_pause: OnPause = "park"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, use the tool, generate again, and so on."""
        world, attempt = current(), sample.attempt
        if world.rng.random() < _CLEANS_UP:
            ctx.work.on_end(lambda: world.at_most(world.rng.uniform(0.01, 0.5)))
        await ctx.generate()
        for _ in range(world.rng.choice(_FURTHER_TURNS)):
            await self._use(world)
            ctx.append(list(_TOOL_IDS))
            await ctx.generate()
        await self._use(world)
        ctx.append(list(_TOOL_IDS))
        sampling = None
        if world.life.config.experts.enabled and world.rng.random() < _DECLINES:
            world.declined[sample.sample_id] = world.life.number, attempt
            sampling = ctx.sampling.model_copy(update={"return_routed_experts": False})
        await ctx.generate(None, sampling)
        if world.rng.random() < _THINKS:
            await world.at_most(world.rng.uniform(0.01, 1.0))
        return sample

    @staticmethod
    async def _use(world: World) -> None:
        """Use the tool, which is slow at times."""
        strike = world.faults.strike("agent_tool") if world.faults.draw(("agent_tool",)) else None
        try:
            await world.at_most(world.rng.uniform(0.01, 0.3) if strike is None else world.rng.uniform(0.5, 4.0))
        finally:
            if strike is not None:
                strike.end()


class Unruly:
    """One turn and some thinking; does not leave, or not at once, when it is told to."""

    on_pause: OnPause = "abort"
    one_turn = True

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Make the turn, and think about it for too long."""
        world, attempt = current(), sample.attempt
        await ctx.generate(sample.prompt_ids)
        fault = world.faults.draw(AGENT[:2])
        if fault is None:
            return sample
        strike = world.faults.strike(fault)
        try:
            await world.at_most(world.rng.uniform(0.2, 5.0))
        except asyncio.CancelledError:
            await world.at_most(world.rng.uniform(0.05, 2.0))
            if fault == "agent_slow_cleanup":
                raise
            await self._cling(sample, attempt)
        finally:
            strike.end()
        return sample

    @staticmethod
    async def _cling(sample: Sample, attempt: int) -> None:
        """Write all the same: it must not be possible."""
        try:
            sample.extend(attempt, Segment([903], [-1.0], (), turn=sample.turn))
        except StaleAttempt:
            return
        current().breaks("P3", f"{sample} was written to by a loop whose attempt was revoked")
