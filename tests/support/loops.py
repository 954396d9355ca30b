"""Agent loops for tests: a good one with a tool, and several that behave badly.

- Nothing sleeps: a loop that waits goes on when the test sets its event.
"""

from __future__ import annotations

import asyncio

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.errors import Interrupted
from rollout_svc.sample import Sample
from rollout_svc.segment import Segment
from tests.support.bell import Bell

__all__ = ["TOOL_IDS", "Broken", "Clinging", "Half", "Oblivious", "Quitting", "Tidy", "ToolUser"]

TOOL_IDS = [7, 8]
"""What the tool of `ToolUser` says, as token ids."""


class _Loop:
    on_pause: OnPause = "abort"

    def __init__(self) -> None:
        self.bell = Bell()
        self.go_on = asyncio.Event()
        self.waiting = 0
        self.ended: list[str] = []
        self.runs = 0

    async def wait(self) -> None:
        """Wait until the test sets `go_on`."""
        self.waiting += 1
        self.bell.ring()
        try:
            await self.go_on.wait()
        finally:
            self.waiting -= 1


class ToolUser(_Loop):
    """Two turns with a slow tool between them; parks at a pause."""

    on_pause: OnPause = "park"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, use the tool, generate again."""
        self.runs += 1
        first = await ctx.generate(sample.prompt_ids)
        await self.wait()
        sample.extend(sample.attempt, Segment(TOOL_IDS, [0.0] * len(TOOL_IDS), (), by_model=False, turn=sample.turn))
        await ctx.generate([*sample.prompt_ids, *first.ids, *TOOL_IDS])
        return sample


class Half(_Loop):
    """The first member of a group uses a slow tool and parks; the others are done after one turn."""

    on_pause: OnPause = "park"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, and wait for a tool where it is the first."""
        self.runs += 1
        await ctx.generate(sample.prompt_ids)
        if sample.index == 0:
            await self.wait()
        return sample


class Clinging(_Loop):
    """Swallows its cancellation, waits on, and then tries to write into its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, and never leave when asked to."""
        self.runs += 1
        await ctx.generate(sample.prompt_ids)
        attempt = sample.attempt
        while not self.go_on.is_set():
            try:
                await self.wait()
            except asyncio.CancelledError:
                self.bell.ring()
        try:
            sample.extend(attempt, Segment([1], [-1.0], ()))
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.ended.append(sample.sample_id)
            self.bell.ring()
        return sample


class Oblivious(_Loop):
    """Takes no notice of an interruption, and returns as if its turn were whole."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate once, whatever comes of it."""
        self.runs += 1
        try:
            await ctx.generate(sample.prompt_ids)
        except Interrupted:
            self.ended.append(sample.sample_id)
        return sample


class Broken(_Loop):
    """Raises a plain error before its turn."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Fail."""
        self.runs += 1
        raise RuntimeError("the loop is broken")


class Quitting(_Loop):
    """Cancels itself, although nobody asked it to."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Leave as a cancelled task does."""
        self.runs += 1
        raise asyncio.CancelledError


class Tidy(_Loop):
    """Takes long to clean up behind itself, whatever ended its turn, and does so to the end."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, and clean up in a task of its own that no cancellation reaches."""
        self.runs += 1
        try:
            await ctx.generate(sample.prompt_ids)
        finally:
            cleaning = asyncio.ensure_future(self._clean(sample.sample_id))
            while not cleaning.done():
                try:
                    await asyncio.shield(cleaning)
                except asyncio.CancelledError:
                    self.bell.ring()
        return sample

    async def _clean(self, sample_id: str) -> None:
        await self.wait()
        self.ended.append(sample_id)
        self.bell.ring()
