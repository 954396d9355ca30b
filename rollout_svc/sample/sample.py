"""One answer: its tokens, its status, and the attempt that may write to it.

Invariants:

- `transition` is the only writer of a status, and only along the arrows below; a settled sample never moves.
- Every write names an attempt. A revoked attempt writes nothing: the write counts as `late_discarded` and raises.
- The ledger is told of every move in the same synchronous step, so it balances between any two awaits.
- Tokens only grow, except when a sample is redone (ABORTED or GENERATING to INIT) or settled without being
  consumed, where they are dropped: what is FAILED, EXPIRED or FILTERED keeps counts and reasons, no more (P28); and
  where a turn that was cut gives its last ones back, to be made again.
- Its routed experts are its own: those of the tokens it has, or of fewer; whoever writes under a revoked attempt loses
  what it brought. They are released with the tokens, and once it is CONSUMED; a sample one of whose turns asked for
  none has none, and that is no failure.
- A COMPLETED sample is its record, encoded once while its tokens are at hand: a third of the memory of token objects,
  nothing for the collector to look at, and what every way out sends as it is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from rollout_svc.errors import IllegalTransition, SampleFailure, StaleAttempt
from rollout_svc.heavy import FirstRows, Heavy
from rollout_svc.ledger import Ledger
from rollout_svc.sample.reading import SampleReading
from rollout_svc.sample.state import SampleState
from rollout_svc.sample.status import ACCOUNT_OF, ARROWS, DROPPED, SETTLED_STATUSES, ResumeAt, SampleStatus
from rollout_svc.segment import FinishReason, Segment, VersionSpan

__all__ = ["SETTLED_STATUSES", "ResumeAt", "Sample", "SampleStatus"]

_S: Final = SampleStatus


class _Left(NamedTuple):
    """The conversation that was left for another one, until a turn of that is whole."""

    turn: int
    prompt_ids: list[int]
    segments: list[Segment]
    earlier: int


class Sample(SampleReading):
    """One answer of a group; see the module's invariants."""

    __slots__ = (
        "_earlier_spans",
        "_leased",
        "_ledger",
        "_left",
        "_length",
        "_spans",
        "asked_ids",
        "attempt",
        "earlier",
        "engine_finish_reason",
        "experts",
        "failures",
        "finish_reason",
        "generate_s",
        "group_id",
        "index",
        "judge_s",
        "meta",
        "packed",
        "prompt_ids",
        "reason",
        "response",
        "resume_at",
        "reward",
        "reward_parts",
        "sample_id",
        "segments",
        "since",
        "status",
        "turn",
        "worker_failures",
    )

    def __init__(
        self,
        *,
        sample_id: str,
        group_id: str,
        index: int,
        prompt_ids: list[int],
        ledger: Ledger,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.sample_id = sample_id
        self.group_id = group_id
        self.index = index
        self.prompt_ids = prompt_ids
        self.asked_ids: list[int] | None = None  # the prompt's own, where the conversation began again with others
        self.earlier: list[dict[str, Any]] = []  # records of the conversations before that, oldest first
        self.status = SampleStatus.INIT
        self.attempt = 0
        self.segments: list[Segment] = []
        self.turn = 0
        self.finish_reason: FinishReason | None = None
        self.engine_finish_reason: str | None = None
        self.resume_at: ResumeAt | None = None
        self.reward: float | None = None
        self.reward_parts: dict[str, float] = {}
        self.generate_s: float | None = None  # in its agent loop, since its first token was begun; None: not known
        self.judge_s: float | None = None  # at its judge, the line before it included
        self.response: str | None = None
        self.reason: str | None = None
        self.meta: dict[str, Any] = meta or {}
        self.packed: bytes | None = None
        self.experts: Heavy | None = None  # rows of routing from the first token on
        self.failures = 0
        self.worker_failures: list[tuple[str, int]] = []
        self.since = 0.0  # loop time at which its last task ended, for those who wonder what it waits for
        self._ledger = ledger
        self._leased = False
        self._left: _Left | None = None
        self._length = 0
        self._spans: tuple[VersionSpan, ...] = ()
        self._earlier_spans: tuple[tuple[VersionSpan, ...], ...] = ()

    def __repr__(self) -> str:
        return f"<Sample {self.sample_id} {self.status} attempt={self.attempt} tokens={self.response_length}>"

    # -- writing ---------------------------------------------------------------------------------------------

    def check(self, attempt: int) -> None:
        """Raise StaleAttempt, and count the write as late, unless `attempt` is the one in force."""
        if attempt != self.attempt:
            self._ledger.late_discarded += 1
            raise StaleAttempt(f"{self.sample_id}: attempt {attempt} was revoked; {self.attempt} is in force")

    def transition(
        self,
        attempt: int,
        to: SampleStatus,
        *,
        reason: str | None = None,
        resume_at: ResumeAt | None = None,
    ) -> None:
        """Move to another status, told to the ledger in the same step.

        Args:
            attempt: the attempt in whose name this is written.
            to: the new status.
            reason: typed reason; required for FAILED, EXPIRED and FILTERED.
            resume_at: where an ABORTED sample goes on; required for ABORTED.

        Raises:
            StaleAttempt: the attempt was revoked.
            IllegalTransition: no such arrow, or its reason or resume_at is missing.
        """
        self.check(attempt)
        dropped = to in DROPPED
        if to not in ARROWS[self.status]:
            raise IllegalTransition(f"{self.sample_id}: {self.status} -> {to}")
        if dropped and not reason:
            raise IllegalTransition(f"{self.sample_id}: {to} needs a reason")
        if to is SampleStatus.ABORTED and resume_at is None:
            raise IllegalTransition(f"{self.sample_id}: ABORTED needs resume_at")
        if self.status is SampleStatus.ABORTED and to is not SampleStatus.INIT and not dropped:
            wanted = SampleStatus.JUDGING if self.resume_at == "judge" else SampleStatus.GENERATING
            if to is not wanted:
                raise IllegalTransition(f"{self.sample_id}: ABORTED at {self.resume_at} -> {to}")
        if to is SampleStatus.COMPLETED and self.reward is None:
            raise IllegalTransition(f"{self.sample_id}: COMPLETED without a reward")
        self._ledger.move_samples(self.account, ACCOUNT_OF[to])
        if to is SampleStatus.INIT:
            self._ledger.redone += 1
        self.status = to
        self.reason = reason
        self.resume_at = resume_at if to is SampleStatus.ABORTED else None
        if to is SampleStatus.INIT or dropped:
            self._drop_payload(for_good=dropped)
        if to is SampleStatus.CONSUMED:
            self._release_experts("consumed")

    def hand_out(self, *, partial: bool = True) -> int:
        """Give the sample to a task: a new attempt, and GENERATING or JUDGING; returns the attempt.

        A sample that was aborted after its engine had finished gets the engine's finish reason back. One whose agent
        loop was past its first turn is redone: the loop begins again, and would add its turns to those it made before.
        So is one that was cut where that is not to be gone on with (`partial` false).

        Raises:
            IllegalTransition: the sample is neither INIT nor ABORTED; the attempt in force stays so.
        """
        if self.status not in (SampleStatus.INIT, SampleStatus.ABORTED):
            raise IllegalTransition(f"{self.sample_id}: {self.status} cannot be handed out")
        self.attempt += 1
        if self.status is SampleStatus.ABORTED and self.resume_at == "judge":
            if self.finish_reason == "abort":
                self.finish_reason = "length" if self.engine_finish_reason in ("length", "abort") else "stop"
            self.transition(self.attempt, SampleStatus.JUDGING)
        else:
            if self.restarts(partial=partial):
                self.transition(self.attempt, SampleStatus.INIT, reason="restarted")
            self.finish_reason = None
            self.transition(self.attempt, SampleStatus.GENERATING)
        return self.attempt

    def revoke(self) -> None:
        """Take the sample from whoever holds it: from now on that attempt writes nothing."""
        self.attempt += 1

    def extend(self, attempt: int, segment: Segment, experts: Heavy | None = None) -> None:
        """Append tokens under an attempt while it generates; empty segments are not kept.

        Args:
            attempt: the attempt in whose name this is written.
            segment: the tokens.
            experts: the routing of all tokens so far, this sample's from now on, in place of what it had; None: as it
                was. Where this raises they are released.

        Raises:
            StaleAttempt: the attempt was revoked.
            IllegalTransition: it does not generate.
        """
        try:
            self._check_generating(attempt)
        except (StaleAttempt, IllegalTransition):
            if experts is not None:
                experts.release(f"{self.sample_id}: a revoked write")
            raise
        if segment.ids:
            self.segments.append(segment)
        if experts is not None:
            self._release_experts("its continuation")
            self.experts = experts

    def begin_again(self, attempt: int, prompt_ids: list[int], reason: str) -> None:
        """Go on in another conversation: what was said so far is kept as a training segment of its own.

        Args:
            attempt: the attempt in whose name this is written.
            prompt_ids: what the new conversation begins with; its tokens follow.
            reason: why it does not go on from the tokens there are.

        Raises:
            StaleAttempt: the attempt was revoked.
            IllegalTransition: it does not generate.
        """
        self._check_generating(attempt)
        if self._left is None or self._left.turn != self.turn:
            self._left = _Left(self.turn, self.prompt_ids, self.segments, len(self.earlier))
        if any(segment.by_model for segment in self.segments):
            self.earlier.append(self.tokens() | {"reason": reason})
        if self.asked_ids is None:
            self.asked_ids = self.prompt_ids
        self.prompt_ids, self.segments = prompt_ids, []
        self._release_experts("another conversation")

    def drop_turn(self, attempt: int) -> None:
        """Forget what was added for the turn that is under way, the model's tokens and others: nobody was told of it.

        Where another conversation began with that turn, the one before it is gone on with.

        Raises:
            StaleAttempt: the attempt was revoked.
            IllegalTransition: it does not generate.
        """
        self._check_generating(attempt)
        made, left = self.turn_length, self._left
        if left is not None and left.turn == self.turn:
            self.prompt_ids, self.segments, self._left = left.prompt_ids, left.segments, None
            del self.earlier[left.earlier :]
            self.asked_ids = None if self.prompt_ids is self.asked_ids else self.asked_ids
        self.segments = [segment for segment in self.segments if segment.turn != self.turn]
        if made:  # what was only appended has no rows of its own yet, and no finish
            self.engine_finish_reason = None
            self._release_experts("a turn that was dropped")

    def give_back(self, attempt: int, count: int) -> None:
        """Forget the last `count` tokens the model has made in the turn that is under way, and the rows after them.

        Raises:
            StaleAttempt: the attempt was revoked.
            IllegalTransition: it does not generate.
        """
        self._check_generating(attempt)
        for segment in self.own_segments()[::-1]:
            kept = max(0, len(segment.ids) - count)
            count -= len(segment.ids) - kept
            at = next(place for place, other in enumerate(self.segments) if other is segment)
            self.segments[at : at + 1] = [segment.first(kept)] if kept else []
            if not count:
                break
        if self.experts is not None and self.rows_missing < 0:
            self.experts = FirstRows(self.experts, self.experts.shape[0] + self.rows_missing)

    def give_up_experts(self, attempt: int, by: str) -> None:
        """Release the routed experts it has, under an attempt; `by`: why.

        Raises:
            StaleAttempt: the attempt was revoked.
        """
        self.check(attempt)
        self._release_experts(by)

    def _check_generating(self, attempt: int) -> None:
        self.check(attempt)
        if self.status is not SampleStatus.GENERATING:
            raise IllegalTransition(f"{self.sample_id}: {self.status} takes no tokens")

    def let_go(self, by: str) -> None:
        """Release what heavy things it has, whoever holds it: nobody will use them any more."""
        self._release_experts(by)

    def _release_experts(self, by: str) -> None:
        if self.experts is not None:
            self.experts.release(f"{self.sample_id}: {by}")
            self.experts = None

    def grade(self, attempt: int, value: float, parts: dict[str, float]) -> None:
        """Record the reward and complete the sample: from here on it is its encoded record.

        Raises:
            SampleFailure: `not_json`: the reward's parts or the sample's meta cannot be written down.
        """
        self.check(attempt)
        if self.status is not SampleStatus.JUDGING:
            raise IllegalTransition(f"{self.sample_id}: {self.status} takes no reward")
        try:
            packed = orjson.dumps(self._record(value, parts), option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise SampleFailure("not_json", f"{self.sample_id}: {error}") from error
        self._length, self._spans = self.response_length, self.weight_versions
        self._earlier_spans = self.earlier_versions
        self.reward = value
        self.reward_parts = parts
        self.transition(attempt, SampleStatus.COMPLETED)
        self.packed = packed
        self.segments, self.earlier, self._left = [], [], None
        self.response = None

    def set_leased(self, *, leased: bool) -> None:
        """Count a COMPLETED sample as leased, or as ready again."""
        if self.status is not SampleStatus.COMPLETED:
            raise IllegalTransition(f"{self.sample_id}: {self.status} cannot be leased")
        if leased != self._leased:
            before = self.account
            self._leased = leased
            self._ledger.move_samples(before, self.account)

    # -- lasting ---------------------------------------------------------------------------------------------

    def recall(self, state: SampleState, experts: Heavy | None = None) -> None:
        """Be what was noted in an earlier life, whose attempts write nothing any more.

        Args:
            state: what was noted.
            experts: its routed experts, this sample's from now on; where this raises they stay the caller's.

        Raises:
            IllegalTransition: this sample has a life of its own already, or nothing could go on from that status.
        """
        status = SampleStatus(state.status)
        if self.status is not SampleStatus.INIT or self.attempt:
            raise IllegalTransition(f"{self.sample_id}: {self.status} cannot be recalled")
        if status not in (SampleStatus.INIT, SampleStatus.ABORTED, SampleStatus.COMPLETED):
            raise IllegalTransition(f"{self.sample_id}: nothing goes on from {status}")
        self._ledger.move_samples("queued", ACCOUNT_OF[status])
        self.status, self.attempt, self.failures, self.turn = status, state.attempt + 1, state.failures, state.turn
        self.resume_at, self.finish_reason = state.resume_at, state.finish_reason
        self.engine_finish_reason = state.engine_finish_reason
        self.segments, self.packed = list(state.segments), state.packed
        self.reward, self.reward_parts = state.reward, dict(state.reward_parts or {})
        self._length, self._spans, self._earlier_spans = state.length, state.spans, state.earlier_spans
        self.experts = experts
        if state.prompt_ids is not None:
            self.asked_ids, self.prompt_ids = self.prompt_ids, state.prompt_ids
        self.earlier = list(state.earlier)
        if state.meta is not None:
            self.meta = state.meta

    def _drop_payload(self, *, for_good: bool) -> None:
        """Let go of what it holds; for good: of everything but counts and reasons."""
        if for_good:
            self._length = self._length if self.packed is not None else sum(len(part.ids) for part in self.segments)
            self._spans = ()
            self._earlier_spans = ()
            self.asked_ids = []
            self.meta = {}
        self._release_experts(f"{self.status} ({self.reason})")
        self.generate_s = self.judge_s = None
        self.packed = None
        self.segments, self.earlier, self._left = [], [], None
        if self.asked_ids is not None:
            self.prompt_ids, self.asked_ids = self.asked_ids, None
        self.turn = 0
        self.response = None
        self.reward = None
        self.reward_parts = {}
        self.finish_reason = None
        self.engine_finish_reason = None
