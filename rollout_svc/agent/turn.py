"""One turn of the model, who asks for it, and who answers.

Invariant: values and protocols; nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Completion, WrittenIds
from rollout_svc.gate import Lane
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.segment import FinishReason, Segment

if TYPE_CHECKING:
    from rollout_svc.agent.context import AgentContext

__all__ = ["LOGPROBS_MODE", "Agent", "EngineCaller", "OnPause", "Turn"]

OnPause = Literal["abort", "park"]
LOGPROBS_MODE: Final = "logprobs_mode"
"""Key of a sample's `meta`: what its logprobs are of, `raw`, `processed`, `unknown`; `mixed` over several engines."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One whole answer of the model: all its tokens, over as many engine calls as it took."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    @property
    def ids(self) -> list[int]:
        """Token ids, in a list of the caller's own."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def logprobs(self) -> list[float]:
        """One logprob for each, likewise."""
        return [value for segment in self.segments for value in segment.logprobs]


class Agent(Protocol):
    """A loop that turns a sample into a finished conversation."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Call `ctx.generate` once per turn and return the sample."""


class EngineCaller(Protocol):
    """Makes one engine call, retries included; given to the context by the pool."""

    async def generate(
        self,
        sample: Sample,
        prompt: Prompt,
        lane: Lane,
        input_ids: list[int] | WrittenIds,
        max_tokens: int,
        sampling: SamplingConfig,
        *,
        experts: bool = False,
    ) -> Completion:
        """Return a valid completion; raises Interrupted, WorkerFailure or SampleFailure.

        With `experts` it asks for routed experts, from the first row the sample has not got.
        """
