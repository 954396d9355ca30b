"""What a pause may find besides requests: judges that hang, loops that are busy, loops that are parked."""

from __future__ import annotations

import asyncio

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.judging import JudgedSample
from rollout_svc.sample import Sample

__all__ = ["Busy", "HungJudger", "Parked"]


class HungJudger:
    """Never says anything."""

    async def judge(self, sample: JudgedSample) -> float:
        """Wait for what does not come."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody ends it but a cancellation")


class Busy:
    """A loop in code of its own, that a pause has to cancel."""

    on_pause: OnPause = "abort"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Wait for what does not come."""
        await asyncio.get_running_loop().create_future()
        return sample


class Parked(Busy):
    """The same, that a pause lets be."""

    on_pause: OnPause = "park"
