"""What there is to be read of a sample: its tokens, and where it stands.

Invariant: nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile
from typing import Any

import orjson

from rollout_svc.heavy import Heavy
from rollout_svc.ledger import Account
from rollout_svc.sample.state import SampleState
from rollout_svc.sample.status import ACCOUNT_OF, SETTLED_STATUSES, ResumeAt, SampleStatus
from rollout_svc.segment import FinishReason, Segment, VersionSpan, joined_spans, spans_of

__all__ = ["SampleReading"]


class SampleReading:
    """The reading side of a sample, which has the attributes."""

    __slots__ = ()

    sample_id: str
    status: SampleStatus
    attempt: int
    failures: int
    prompt_ids: list[int]
    asked_ids: list[int] | None
    segments: list[Segment]
    turn: int
    packed: bytes | None
    earlier: list[dict[str, Any]]
    experts: Heavy | None
    resume_at: ResumeAt | None
    finish_reason: FinishReason | None
    engine_finish_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]
    response: str | None
    meta: dict[str, Any]
    _leased: bool
    _length: int
    _spans: tuple[VersionSpan, ...]
    _earlier_spans: tuple[tuple[VersionSpan, ...], ...]

    @property
    def settled(self) -> bool:
        """Whether the outcome is for good."""
        return self.status in SETTLED_STATUSES

    @property
    def account(self) -> Account:
        """The ledger account this sample is counted in."""
        return "leased" if self._leased and self.status is SampleStatus.COMPLETED else ACCOUNT_OF[self.status]

    @property
    def response_length(self) -> int:
        """Number of response tokens, the environment's included."""
        if self.packed is not None or self.settled:
            return self._length
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def response_ids(self) -> list[int]:
        """Response token ids over all segments."""
        if self.packed is not None:
            return list(orjson.loads(self.packed)["response_ids"])
        if len(self.segments) == 1:
            return self.segments[0].ids
        return [token for segment in self.segments for token in segment.ids]

    @property
    def logprobs(self) -> list[float]:
        """One logprob per response token; 0.0 for tokens the model did not make."""
        if self.packed is not None:
            return list(orjson.loads(self.packed)["logprobs"])
        if len(self.segments) == 1:
            return self.segments[0].logprobs
        return [value for segment in self.segments for value in segment.logprobs]

    @property
    def loss_mask(self) -> list[int]:
        """One 0 or 1 per response token: 1 where the model made it."""
        if self.packed is not None:
            return list(orjson.loads(self.packed)["loss_mask"])
        mask: list[int] = []
        for segment in self.segments:
            mask += [int(segment.by_model)] * len(segment.ids)
        return mask

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """Weight versions over `response_ids`, neighbours that differ in nothing joined; model tokens only."""
        if self.packed is not None:
            return self._spans
        return joined_spans(self.segments)

    @property
    def earlier_versions(self) -> tuple[tuple[VersionSpan, ...], ...]:
        """Likewise of each conversation before this one, oldest first, over its own tokens."""
        if self.packed is not None:
            return self._earlier_spans
        return tuple(spans_of(record) for record in self.earlier)

    @property
    def all_versions(self) -> tuple[VersionSpan, ...]:
        """Weight versions of every token the model made, those of earlier conversations first: for their age alone."""
        return (*chain.from_iterable(self.earlier_versions), *self.weight_versions)

    @property
    def rows_missing(self) -> int:
        """Rows of routed experts that its tokens should have and it has not got: one a token, but for the last."""
        held = 0 if self.experts is None else self.experts.shape[0]
        return len(self.prompt_ids) + self.response_length - 1 - held

    def prefix_ids(self) -> list[int]:
        """The prompt and all tokens but those the model has made in the turn that is under way."""
        own = [token for segment in self.segments if not self._of_this_turn(segment) for token in segment.ids]
        return self.prompt_ids + own

    def _under_way(self) -> Iterator[Segment]:
        """Segments of the turn that is under way, the last one first: they end the list."""
        return takewhile(lambda segment: segment.turn == self.turn, reversed(self.segments))

    def own_segments(self) -> tuple[Segment, ...]:
        """What the model has made in the turn that is under way."""
        return tuple(segment for segment in self._under_way() if segment.by_model)[::-1]

    def _of_this_turn(self, segment: Segment) -> bool:
        return segment.turn == self.turn and segment.by_model

    def turn_ids(self) -> list[int]:
        """Tokens the model has made in the turn that is under way (its prefix when it is continued)."""
        return [token for segment in self.own_segments() for token in segment.ids]

    @property
    def turn_length(self) -> int:
        """How many those are."""
        return sum(len(segment.ids) for segment in self._under_way() if segment.by_model)

    def restarts(self, *, partial: bool = True) -> bool:
        """Whether handing it out drops its tokens: only a first turn can be gone on with in another run of the loop.

        Args:
            partial: whether a turn that was cut may be gone on with at all; one that came whole may in any case.
        """
        if self.status is not SampleStatus.ABORTED or self.resume_at != "generate":
            return False
        if self.turn > 0 or not all(segment.by_model for segment in self.segments):
            return True
        return not partial and (not self.segments or self.engine_finish_reason in (None, "abort"))

    def tokens(self) -> dict[str, Any]:
        """The tokens of the conversation under way, as a record tells them."""
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.response_ids,
            "logprobs": self.logprobs,
            "loss_mask": self.loss_mask,
            "weight_versions": [span.as_json() for span in self.weight_versions],
        }

    def state(self, more: Segment | None = None, *, experts: bool = True) -> SampleState:
        """What is to survive of it now.

        Args:
            more: tokens that have come and are not in its segments yet.
            experts: its routed experts as well, which are read, not copied, and so outlive their handle.
        """
        return SampleState(
            status=str(self.status),
            attempt=self.attempt,
            failures=self.failures,
            turn=self.turn,
            resume_at=self.resume_at,
            finish_reason=self.finish_reason,
            engine_finish_reason=self.engine_finish_reason,
            segments=tuple(self.segments) if more is None else (*self.segments, more),
            reward=self.reward,
            reward_parts=self.reward_parts or None,
            packed=self.packed,
            length=self._length,
            spans=self._spans,
            earlier_spans=self._earlier_spans,
            meta=self.meta,
            experts=self.experts.read() if experts and self.experts is not None else None,
            prompt_ids=self.prompt_ids if self.asked_ids is not None else None,
            earlier=tuple(self.earlier),
        )

    def _record(self, reward: float, parts: dict[str, float]) -> dict[str, Any]:
        """The sample's record in a batch, as it is once completed."""
        return {
            "sample_id": self.sample_id,
            "status": str(SampleStatus.COMPLETED),
            "finish_reason": self.finish_reason,
            "engine_finish_reason": self.engine_finish_reason,
            "reward": reward,
            "reward_parts": parts,
            **self.tokens(),  # before what is anybody's own, in which the names of these lists may be
            **({"earlier_segments": self.earlier} if self.earlier else {}),
            "response": self.response,
            "meta": self.meta,
        }
