"""A sample: its arrows, the fence of its attempts, and its tokens."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_svc.errors import IllegalTransition, StaleAttempt
from rollout_svc.ledger import ACCOUNTS, Ledger
from rollout_svc.sample import ResumeAt, Sample, SampleStatus
from rollout_svc.segment import Segment, VersionSpan
from tests.support.groups import make_sample, run_to, segment, state_of

S = SampleStatus
DROPPED = {S.FAILED, S.EXPIRED, S.FILTERED}
SETTLED = DROPPED | {S.CONSUMED}
ARROWS = {
    S.INIT: {S.GENERATING},
    S.GENERATING: {S.GENERATED, S.ABORTED, S.INIT},
    S.GENERATED: {S.JUDGING, S.ABORTED},
    S.JUDGING: {S.COMPLETED, S.ABORTED},
    S.ABORTED: {S.GENERATING, S.JUDGING, S.INIT},
    S.COMPLETED: {S.CONSUMED},
}
"""The picture in the module's docstring, written again; besides, every unsettled state may be dropped."""
ACCOUNTS_OF = {
    S.INIT: "queued",
    S.GENERATING: "in_flight",
    S.GENERATED: "in_flight",
    S.JUDGING: "in_flight",
    S.ABORTED: "aborted",
    S.COMPLETED: "ready",
    S.CONSUMED: "consumed",
    S.FAILED: "failed",
    S.EXPIRED: "expired",
    S.FILTERED: "filtered",
}

statuses = st.sampled_from(SampleStatus)
reasons = st.none() | st.just("some_reason")
resume_points: st.SearchStrategy[ResumeAt | None] = st.sampled_from([None, "generate", "judge"])
segments = st.builds(
    segment,
    st.lists(st.integers(0, 99), max_size=4),
    st.none() | st.integers(0, 2),
    by_model=st.booleans(),
    confirmed=st.booleans(),
)


class SampleMoves(RuleBasedStateMachine):
    """One sample pushed around, legally and not, beside a model of what it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.sample = make_sample(self.ledger)
        self.status = S.INIT
        self.resume_at: ResumeAt | None = None
        self.attempt = 0
        self.leased = False
        self.rewarded = False
        self.tokens: list[int] = []
        self.counted = 0
        self.late = 0
        self.redone = 0
        self.turned = False

    def refused(self, error: type[Exception], call: Any) -> None:
        """Check that a call raises and that nothing changed but, for a stale one, the one count."""
        before = state_of(self.sample)
        with pytest.raises(error):
            call()
        if error is StaleAttempt:
            self.late += 1
            before["ledger"]["late_discarded"] += 1
        assert state_of(self.sample) == before

    def legal(self, to: SampleStatus, reason: str | None, resume_at: ResumeAt | None) -> bool:
        if self.status in SETTLED:
            return False
        if to in DROPPED:
            return reason is not None
        if to not in ARROWS[self.status]:
            return False
        if to is S.ABORTED:
            return resume_at is not None
        if self.status is S.ABORTED and to is not S.INIT:
            return to is (S.JUDGING if self.resume_at == "judge" else S.GENERATING)
        return to is not S.COMPLETED or self.rewarded

    def moved(self, to: SampleStatus, resume_at: ResumeAt | None = None) -> None:
        self.status = to
        self.resume_at = resume_at if to is S.ABORTED else None
        self.leased = self.leased and to is S.COMPLETED
        if to is S.INIT:
            self.redone += 1
        if to in DROPPED:
            self.counted = len(self.tokens)
        if to is S.INIT or to in DROPPED:
            self.tokens = []
            self.rewarded = self.turned = False

    @rule(to=statuses, reason=reasons, resume_at=resume_points)
    def transition(self, to: SampleStatus, reason: str | None, resume_at: ResumeAt | None) -> None:
        """Any move: it happens exactly where the picture has an arrow."""

        def call() -> None:
            self.sample.transition(self.attempt, to, reason=reason, resume_at=resume_at)

        if self.legal(to, reason, resume_at):
            call()
            self.moved(to, resume_at)
        else:
            self.refused(IllegalTransition, call)

    @rule()
    def hand_out(self) -> None:
        """A sample is handed out from INIT or ABORTED, to where it goes on."""
        if self.status not in {S.INIT, S.ABORTED}:
            self.refused(IllegalTransition, self.sample.hand_out)
            return
        to = S.JUDGING if self.status is S.ABORTED and self.resume_at == "judge" else S.GENERATING
        again = to is S.GENERATING and self.status is S.ABORTED and self.turned
        attempt = self.sample.hand_out()
        assert attempt > self.attempt
        self.attempt = attempt
        if again:  # a loop that had got past its first turn begins again
            self.tokens, self.turned, self.redone = [], False, self.redone + 1
        self.moved(to)

    @rule()
    def revoke(self) -> None:
        """After this, the attempt in force before is a stale one."""
        before = self.attempt
        self.sample.revoke()
        self.attempt = self.sample.attempt
        assert self.attempt > before

    @rule(what=segments)
    def extend(self, what: Segment) -> None:
        """Tokens are added while the sample generates, and at no other time."""
        if self.status is S.GENERATING:
            self.sample.extend(self.attempt, what)
            self.tokens = self.tokens + what.ids
            self.turned = self.turned or (bool(what.ids) and not what.by_model)
        else:
            self.refused(IllegalTransition, lambda: self.sample.extend(self.attempt, what))

    @rule()
    def grade(self) -> None:
        """A reward is recorded while the sample is judged, and at no other time."""
        if self.status is S.JUDGING:
            self.sample.grade(self.attempt, 0.5, {"part": 0.5})
            self.rewarded = True
            self.moved(S.COMPLETED)
        else:
            self.refused(IllegalTransition, lambda: self.sample.grade(self.attempt, 0.25, {}))

    @rule(leased=st.booleans())
    def lease(self, leased: bool) -> None:
        """Only a COMPLETED sample is leased; saying it twice is saying it once."""
        if self.status is S.COMPLETED:
            self.sample.set_leased(leased=leased)
            self.leased = leased
        else:
            self.refused(IllegalTransition, lambda: self.sample.set_leased(leased=leased))

    @precondition(lambda self: self.attempt > 0)
    @rule(back=st.integers(1, 3), to=statuses, what=segments, which=st.integers(0, 2))
    def stale_write(self, back: int, to: SampleStatus, what: Segment, which: int) -> None:
        """Whatever a revoked attempt asks for, it gets StaleAttempt and is counted once."""  # P3
        stale = max(0, self.attempt - back)
        calls = (
            lambda: self.sample.transition(stale, to, reason="r", resume_at="generate"),
            lambda: self.sample.extend(stale, what),
            lambda: self.sample.grade(stale, 1.0, {}),
        )
        self.refused(StaleAttempt, calls[which])

    @invariant()
    def as_modelled(self) -> None:
        sample = self.sample
        assert (sample.status, sample.attempt, sample.resume_at) == (self.status, self.attempt, self.resume_at)
        assert sample.settled == (self.status in SETTLED)
        assert sample.account == ("leased" if self.leased else ACCOUNTS_OF[self.status])
        assert sample.response_ids == self.tokens
        assert len(self.tokens) == len(sample.logprobs) == len(sample.loss_mask)
        if self.status in DROPPED:  # counts and reasons stay, and nothing else: P28
            assert sample.response_length == self.counted
            assert (sample.segments, sample.packed, sample.response, sample.reward) == ([], None, None, None)
            assert (sample.prompt_ids, sample.meta, sample.weight_versions) == ([], {}, ())
            assert sample.reason == "some_reason"
        else:
            assert sample.response_length == len(self.tokens)

    @invariant()
    def ledger_agrees(self) -> None:
        self.ledger.check()
        assert {name: self.ledger.samples(name) for name in ACCOUNTS} == {
            name: int(name == self.sample.account) for name in ACCOUNTS
        }
        assert (self.ledger.late_discarded, self.ledger.redone) == (self.late, self.redone)

    @invariant()
    def spans_index_the_response(self) -> None:
        if self.status not in DROPPED:
            check_spans(self.sample)


TestSampleMoves = SampleMoves.TestCase
TestSampleMoves.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def check_spans(sample: Sample) -> None:
    """Spans lie in order inside the response, cover the model's tokens and no other, and do not touch their like."""
    spans = sample.weight_versions
    if sample.settled and sample.packed is None:  # its tokens are gone; how many they were is still known
        assert not spans
        assert sample.loss_mask == []
        return
    covered = [0] * sample.response_length
    for span in spans:
        assert 0 <= span.start < span.end <= sample.response_length
        for index in range(span.start, span.end):
            covered[index] += 1
    assert covered == sample.loss_mask
    for one, other in pairwise(spans):
        assert one.end <= other.start
        assert one.end < other.start or (one.version, one.confirmed) != (other.version, other.confirmed)


@given(st.lists(segments, max_size=6))
def test_spans_tell_each_tokens_version(parts: list[Segment]) -> None:
    """Each token made by the model knows the version its engine reported for it, or that it reported none."""  # P7
    sample = make_sample(Ledger())
    attempt = sample.hand_out()
    expected: list[tuple[int | None, bool] | None] = []
    for part in parts:
        sample.extend(attempt, part)
        expected += [(part.spans[0].version, part.spans[0].confirmed) if part.spans else None] * len(part.ids)
    told: list[tuple[int | None, bool] | None] = [None] * sample.response_length
    for span in sample.weight_versions:
        told[span.start : span.end] = [(span.version, span.confirmed)] * (span.end - span.start)
    assert told == expected
    check_spans(sample)


def test_spans_of_one_segment_are_joined_too() -> None:
    """Neighbours of one version are one span, also where a single engine call reported two."""  # P7
    sample = make_sample(Ledger())
    spans = (VersionSpan(1, 0, 1), VersionSpan(1, 1, 2), VersionSpan(2, 2, 3))
    sample.extend(sample.hand_out(), Segment([1, 2, 3], [0.0] * 3, spans))
    assert sample.weight_versions == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))


def test_continued_over_an_update_a_sample_has_two_versions() -> None:
    """Tokens made before a hand-back keep their version; those after it have the new one."""  # P6, P7
    sample = make_sample(Ledger())
    first = sample.hand_out()
    sample.extend(first, segment([1, 2], 4))
    sample.transition(first, S.ABORTED, reason="hand_back", resume_at="generate")
    sample.revoke()
    second = sample.hand_out()
    sample.extend(second, segment([3], 5))
    assert sample.response_ids == [1, 2, 3]
    assert sample.weight_versions == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))


@pytest.mark.parametrize(
    ("engine", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "length"), ("repetition", "stop")]
)
def test_a_late_answer_gets_its_finish_reason_back(engine: str, ours: str) -> None:
    """A sample whose engine had finished goes on at its judge, with the reason the engine gave."""  # P6
    sample = make_sample(Ledger())
    attempt = sample.hand_out()
    sample.extend(attempt, segment([1]))
    sample.engine_finish_reason, sample.finish_reason = engine, "abort"
    sample.transition(attempt, S.ABORTED, reason="interrupted", resume_at="judge")
    sample.hand_out()
    assert (sample.status, sample.finish_reason, sample.response_ids) == (S.JUDGING, ours, [1])


def test_a_redone_sample_starts_from_its_prompt() -> None:
    """Redoing drops every token and says so in the ledger; failures so far still count."""
    ledger = Ledger()
    sample = make_sample(ledger)
    attempt = sample.hand_out()
    sample.extend(attempt, segment([1, 2]))
    sample.failures, sample.turn = 1, 1
    sample.transition(attempt, S.INIT, reason="invalid_response")
    assert (sample.response_ids, sample.turn, sample.failures, ledger.redone) == ([], 0, 1, 1)


@pytest.mark.parametrize("outcome", sorted(DROPPED))
def test_dropped_samples_keep_no_payload(outcome: SampleStatus) -> None:
    """FAILED, EXPIRED and FILTERED keep a reason and nothing heavy, and no reward: not even 0."""  # P2, P28
    sample = make_sample(Ledger())
    attempt = run_to(sample, S.COMPLETED)
    sample.response = "text"
    sample.transition(attempt, outcome, reason="stale")
    left = state_of(sample)
    assert (left["segments"], left["response"], left["reward"], left["reward_parts"]) == ([], None, None, {})
    assert sample.reason == "stale"


def test_consumed_keeps_what_the_trainer_took() -> None:
    """Being consumed drops nothing: the batch that was handed over is this very object."""
    sample = make_sample(Ledger())
    attempt = run_to(sample, S.COMPLETED, reward=0.5)
    sample.transition(attempt, S.CONSUMED)
    assert (sample.response_ids, sample.reward) == ([7, 8], 0.5)


def test_turn_ids_are_the_models_tokens_of_this_turn() -> None:
    """The prefix of a continued turn leaves out earlier turns and what the environment said."""  # P6
    sample = make_sample(Ledger())
    attempt = sample.hand_out()
    sample.extend(attempt, segment([1], turn=0))
    sample.turn = 1
    sample.extend(attempt, segment([2], turn=1, by_model=False))
    sample.extend(attempt, segment([3], turn=1))
    sample.extend(attempt, segment([4], turn=1))
    assert sample.turn_ids() == [3, 4]
    assert sample.loss_mask == [1, 0, 1, 1]


@pytest.mark.parametrize("appended", [False, True])
def test_a_sample_that_was_past_its_first_turn_is_made_again(*, appended: bool) -> None:
    """Its loop begins again: what it made before, or was told, is not what it makes now."""  # P6
    sample = make_sample(Ledger())
    attempt = sample.hand_out()
    sample.extend(attempt, segment([7]))
    if appended:
        sample.extend(attempt, segment([5], by_model=False))
    else:
        sample.turn = 1
    sample.transition(attempt, S.ABORTED, resume_at="generate")
    assert sample.restarts()
    sample.hand_out()
    assert (sample.status, sample.turn, sample.response_ids) == (S.GENERATING, 0, [])
