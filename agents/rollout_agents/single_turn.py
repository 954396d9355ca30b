"""`single_turn`: one prompt, one answer."""

from __future__ import annotations

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.sample import Sample

__all__ = ["SingleTurn"]


class SingleTurn:
    """Generate once; a cut answer is continued from its own tokens when the sample is handed out again."""

    on_pause: OnPause = "abort"
    one_turn = True

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Make the one turn."""
        await ctx.generate(sample.prompt_ids)
        return sample
