"""A judger and agent loops for a service in another process: files in a folder say how they behave.

- While `hold` is there a judge call does not answer; while `deaf` is, it does not listen to its cancellation either.
- While `tool` is there the tool of an agent loop does not answer, and one that clings does not leave.
- What waits looks every 20 ms: a file that goes sends no event. What it waits for, it says in a file of its own.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.judging import JudgedSample
from rollout_svc.sample import Sample
from rollout_svc.segment import Segment
from tests.support.loops import TOOL_IDS

__all__ = ["Clinging", "Judge", "ToolUser"]

_POLL_S: Final = 0.02


async def _while(flag: Path) -> None:
    while flag.exists():  # noqa: ASYNC110, ASYNC240 - another process makes and removes it; a look takes microseconds
        await asyncio.sleep(_POLL_S)


def _says(ways: Path, kind: str, name: str) -> None:
    """Leave word that something began; names are unique by the clock."""
    (ways / f"{kind}-{name}-{time.monotonic_ns()}").touch()


class Judge:
    """Gives 1.0, unless it is held."""

    def __init__(self, ways: str) -> None:
        self._ways = Path(ways)

    async def judge(self, sample: JudgedSample) -> float:
        """Give the verdict."""
        _says(self._ways, "judged", sample.sample_id)
        try:
            await _while(self._ways / "hold")
        except asyncio.CancelledError:
            if not (self._ways / "deaf").exists():
                raise
            await _while(self._ways / "deaf")
            return 0.25
        return 1.0


class ToolUser:
    """Two turns with a slow tool between them; parks at a pause."""

    on_pause: OnPause = "park"

    def __init__(self, ways: str) -> None:
        self._ways = Path(ways)

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, use the tool, generate again."""
        _says(self._ways, "ran", sample.sample_id)
        first = await ctx.generate(sample.prompt_ids)
        _says(self._ways, "used", sample.sample_id)
        await _while(self._ways / "tool")
        sample.extend(sample.attempt, Segment(TOOL_IDS, [0.0] * len(TOOL_IDS), (), by_model=False, turn=sample.turn))
        await ctx.generate([*sample.prompt_ids, *first.ids, *TOOL_IDS])
        return sample


class Clinging:
    """Swallows its cancellation while the tool works, and then goes on as if nothing had been."""

    on_pause: OnPause = "abort"

    def __init__(self, ways: str) -> None:
        self._ways = Path(ways)

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Generate, and never leave when asked to."""
        await ctx.generate(sample.prompt_ids)
        _says(self._ways, "clung", sample.sample_id)
        while (self._ways / "tool").exists():
            try:
                await _while(self._ways / "tool")
            except asyncio.CancelledError:
                continue
        return sample
