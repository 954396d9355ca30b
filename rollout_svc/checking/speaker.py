"""The engine of a check: it says what it is told to, and stops when the gate closes, in every way an engine may.

Invariant: it gives a turn's tokens once: asked to go on, it goes on after those it gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from rollout_svc.checking.tongue import spoken
from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Completion
from rollout_svc.errors import Interrupted
from rollout_svc.gate import Gate, Lane
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.segment import FinishReason, VersionSpan
from rollout_svc.signals import GateSignals

__all__ = ["Cut", "Speaker"]

Cut = Literal["partial", "silent", "late"]
"""What becomes of a call when the gate closes: half of its tokens, nothing, or all of them, too late to count."""
_LATENCY_S: Final = 0.1


class Speaker:
    """Answers one sample's calls."""

    __slots__ = ("_cut", "_failure", "_gate", "_latency_s", "_signals", "_texts", "calls")

    def __init__(
        self,
        texts: Sequence[str],
        gate: Gate,
        signals: GateSignals,
        *,
        cut: Cut = "partial",
        failure: tuple[int, Exception] | None = None,
        latency_s: float = _LATENCY_S,
    ) -> None:
        """Make it.

        Args:
            texts: what it says, turn by turn; the last one again where there are more turns.
            gate: of the lane.
            signals: of that gate.
            cut: what becomes of calls that the gate cuts.
            failure: number of a call, from 1, and what that raises.
            latency_s: of one call.
        """
        self._texts = texts
        self._gate = gate
        self._signals = signals
        self._cut = cut
        self._failure = failure
        self._latency_s = latency_s
        self.calls = 0

    async def generate(
        self,
        sample: Sample,
        prompt: Prompt,  # noqa: ARG002 - of the protocol
        lane: Lane,
        input_ids: list[int],  # noqa: ARG002 - held against the sample's by who hands them over
        max_tokens: int,
        sampling: SamplingConfig,  # noqa: ARG002 - of the protocol
        *,
        experts: bool = False,  # noqa: ARG002 - of the protocol
    ) -> Completion:
        """Answer, after a while."""
        self.calls += 1
        if not self._gate.is_open(lane):
            raise Interrupted("the gate is closed")
        rest = spoken(self._texts[min(sample.turn, len(self._texts) - 1)])[sample.turn_length :]
        whole = await self._signals.sleep_while_open(lane, self._latency_s)
        if self._failure is not None and self.calls == self._failure[0]:
            raise self._failure[1]
        if whole or self._cut == "late":
            finish: FinishReason = "stop" if len(rest) <= max_tokens else "length"
            return _completion(rest[:max_tokens], finish, late=not whole)
        if self._cut == "silent":
            raise Interrupted("the call was cut before it was answered")
        return _completion(rest[: min(len(rest) // 2, max_tokens)], "abort", late=True)


def _completion(ids: list[int], finish: FinishReason, *, late: bool) -> Completion:
    spans = (VersionSpan(0, 0, len(ids)),) if ids else ()
    return Completion(ids, [-1.0] * len(ids), finish, finish, spans, late=late, worker="check", logprobs_mode="raw")
