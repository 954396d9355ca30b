"""Groups of samples: one account each, settled as one, and the ledger always agrees with the objects."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollout_svc.errors import IllegalTransition, StaleAttempt
from rollout_svc.group import Group, Settlement
from rollout_svc.ledger import SETTLED, Ledger
from rollout_svc.sample import ResumeAt, Sample, SampleStatus
from rollout_svc.tensors import Handles, MemoryStore
from tests.support.groups import completed, make_group, recount, run_to, segment, state_of
from tests.test_sample import check_spans

S = SampleStatus
RUNNING = {S.GENERATING, S.GENERATED, S.JUDGING}
OUTCOMES = {"consumed": S.CONSUMED, "filtered": S.FILTERED, "expired": S.EXPIRED, "failed": S.FAILED}
FROM: dict[str, set[str]] = {
    "start": {"queued", "aborted"},
    "finish": {"in_flight"},
    "hand_back": {"in_flight"},
    "lease": {"ready"},
    "unlease": {"leased"},
    "consumed": {"leased"},
    "filtered": {"in_flight", "ready"},
    "expired": {"queued", "in_flight", "aborted", "ready", "leased"},
    "failed": {"queued", "in_flight", "aborted", "ready"},
}
"""From which accounts each move of a group may start."""

indexes = st.integers(0, 2)


class GroupMoves(RuleBasedStateMachine):
    """Several groups of one ledger, moved legally and not, their members beside them."""

    groups = Bundle("groups")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.made: list[Group] = []
        self.accounts: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        self.stale: dict[str, int] = {}
        self.late = 0

    # -- how a call is judged --------------------------------------------------------------------------------

    def refused(self, group: Group, call: Callable[[], Any], error: type[Exception] = IllegalTransition) -> None:
        before = state_of(group)
        with pytest.raises(error):
            call()
        after = state_of(group)
        if error is StaleAttempt:
            self.late += 1
            assert self.ledger.late_discarded == self.late
            for state in (after, *after["samples"]):
                state["ledger"]["late_discarded"] -= 1
        assert after == before

    def move(self, group: Group, name: str, call: Callable[[], Any], to: str, *, ready: bool = True) -> bool:
        """Make a group's move where the picture allows it, else see that it is refused; returns whether it was made."""
        if self.accounts[group.group_id] not in FROM[name] or not ready:
            self.refused(group, call)
            return False
        call()
        self.accounts[group.group_id] = to
        return True

    # -- groups ----------------------------------------------------------------------------------------------

    @rule(target=groups, size=st.integers(1, 3))
    def admit(self, size: int) -> Group:
        group = make_group(self.ledger, size, group_id=f"g{len(self.made)}")
        self.made.append(group)
        self.accounts[group.group_id] = "queued"
        return group

    @rule(group=groups)
    def start(self, group: Group) -> None:
        self.move(group, "start", group.start, "in_flight")

    @rule(group=groups)
    def finish(self, group: Group) -> None:
        complete = all(sample.status is S.COMPLETED for sample in group.samples)
        assert group.complete == complete
        self.move(group, "finish", lambda: group.finish(5.0), "ready", ready=complete)

    @rule(group=groups)
    def hand_back(self, group: Group) -> None:
        """Nothing received is lost, no attempt stays in force, and what was finished stays finished."""
        before = [(sample.status, sample.attempt, list(sample.response_ids)) for sample in group.samples]
        if not self.move(group, "hand_back", group.hand_back, "aborted"):
            return
        for sample, (status, attempt, ids) in zip(group.samples, before, strict=True):
            assert sample.response_ids == ids  # P10
            if not sample.settled:
                self.stale[sample.sample_id] = attempt
                assert sample.attempt > attempt
            if status in RUNNING:
                assert sample.status is S.ABORTED
                assert sample.resume_at == ("generate" if status is S.GENERATING else "judge")
            else:
                assert sample.status is status  # P5

    @rule(group=groups)
    def lease(self, group: Group) -> None:
        self.move(group, "lease", group.lease, "leased")

    @rule(group=groups)
    def unlease(self, group: Group) -> None:
        self.move(group, "unlease", group.unlease, "ready")

    @rule(group=groups, outcome=st.sampled_from(sorted(OUTCOMES)), reason=st.sampled_from(["why", None]), who=indexes)
    def settle(self, group: Group, outcome: Settlement, reason: str | None, who: int) -> None:
        """All members go together, each with its reason, and nothing heavy stays unless it was consumed."""
        culprit = group.samples[who] if who < len(group.samples) else None
        attempts = {sample.sample_id: sample.attempt for sample in group.samples}
        reasoned = outcome == "consumed" or reason is not None

        def call() -> None:
            group.settle(outcome, reason, culprit=culprit)

        if not self.move(group, outcome, call, outcome, ready=reasoned):
            return
        self.outcomes[group.group_id] = outcome
        assert (group.settled, group.status, group.reason) == (True, OUTCOMES[outcome], reason)
        self.stale |= attempts
        for sample in group.samples:
            assert sample.attempt > attempts[sample.sample_id]
            if outcome != "consumed":
                assert sample.reason == (reason if culprit in (None, sample) else "sibling_failed")
                assert (sample.segments, sample.reward) == ([], None)  # P28

    # -- members ---------------------------------------------------------------------------------------------

    def member(self, group: Group, index: int) -> Sample:
        return group.samples[index % len(group.samples)]

    @rule(group=groups, index=indexes)
    def hand_out(self, group: Group, index: int) -> None:
        sample = self.member(group, index)
        if self.accounts[group.group_id] == "in_flight" and sample.status in {S.INIT, S.ABORTED}:
            sample.hand_out()

    @rule(group=groups, index=indexes, version=st.integers(0, 2), ids=st.lists(st.integers(0, 9), max_size=3))
    def generate(self, group: Group, index: int, version: int, ids: list[int]) -> None:
        sample = self.member(group, index)
        if sample.status is S.GENERATING:
            sample.extend(sample.attempt, segment(ids, version))

    @rule(group=groups, index=indexes, resume_at=st.sampled_from(["generate", "judge"]), how=st.integers(0, 3))
    def advance(self, group: Group, index: int, resume_at: ResumeAt, how: int) -> None:
        """Take a running member one arrow further: mostly on, sometimes aborted or redone."""
        sample = self.member(group, index)
        if sample.status not in RUNNING:
            return
        if how == 0:
            sample.transition(sample.attempt, S.ABORTED, reason="interrupted", resume_at=resume_at)
        elif how == 1 and sample.status is S.GENERATING:
            sample.transition(sample.attempt, S.INIT, reason="invalid_response")
        elif sample.status is S.JUDGING:
            sample.grade(sample.attempt, 1.0, {})
        else:
            sample.transition(sample.attempt, S.GENERATED if sample.status is S.GENERATING else S.JUDGING)

    @rule(group=groups, index=indexes, which=st.integers(0, 2))
    def late_write(self, group: Group, index: int, which: int) -> None:
        """A write of an attempt that was taken back changes nothing and is counted once."""  # P3
        sample = self.member(group, index)
        stale = self.stale.get(sample.sample_id)
        if stale is None:
            return
        calls = (
            lambda: sample.extend(stale, segment([1])),
            lambda: sample.grade(stale, 1.0, {}),
            lambda: sample.transition(stale, S.GENERATED),
        )
        self.refused(group, calls[which], StaleAttempt)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_the_recount(self) -> None:
        """Both equations hold, and each account is what a count of the objects says."""  # P1
        self.ledger.check()
        told = self.ledger.as_json()
        counted = recount(self.made)
        assert {unit: told[unit] for unit in counted} == counted
        assert told["late_discarded"] == self.late

    @invariant()
    def each_group_is_where_it_was_put(self) -> None:
        for group in self.made:
            assert group.account == self.accounts[group.group_id]
            if group.account in {"ready", "leased"}:
                assert all(sample.account == group.account for sample in group.samples)
            if group.account == "aborted":
                assert not any(sample.status in RUNNING for sample in group.samples)
            for sample in group.samples:
                check_spans(sample)

    @invariant()
    def settled_is_for_good(self) -> None:
        for group in self.made:
            if group.group_id in self.outcomes:
                assert group.account == self.outcomes[group.group_id]
                assert all(sample.account == group.account for sample in group.samples)
            else:
                assert group.account not in SETTLED


TestGroupMoves = GroupMoves.TestCase
TestGroupMoves.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("outcome", ["filtered", "expired", "failed"])
def test_a_completed_member_survives_its_siblings_until_the_end(outcome: Settlement) -> None:
    """Aborts, hand-backs and failures of a sibling leave a COMPLETED member alone; the group's end does not."""  # P5
    group = make_group()
    done, other = group.samples
    group.start()
    run_to(done, S.COMPLETED)
    for _ in range(3):
        attempt = other.hand_out()
        other.transition(attempt, S.INIT, reason="invalid_response")
        other.hand_out()
        group.hand_back()
        group.start()
        assert (done.status, done.reward, done.response_ids) == (S.COMPLETED, 1.0, [7, 8])
    group.settle(outcome, "why", culprit=other)
    assert (done.status, done.reward, done.reason) == (OUTCOMES[outcome], None, "sibling_failed")


def test_a_group_hands_back_what_it_received() -> None:
    """Tokens, and the place where each member goes on, survive a hand-back."""  # P10
    group = make_group(size=4)
    group.start()
    stages = (S.GENERATING, S.GENERATED, S.JUDGING, S.COMPLETED)
    for sample, status in zip(group.samples, stages, strict=True):
        run_to(sample, status)
    group.hand_back(not_before=3.0)
    assert [sample.resume_at for sample in group.samples] == ["generate", "judge", "judge", None]
    assert [sample.response_ids for sample in group.samples] == [[7, 8]] * 4
    assert (group.account, group.hand_backs, group.not_before) == ("aborted", 1, 3.0)


def test_an_unfinished_group_has_no_status() -> None:
    """Asking for the outcome of a group that has none is an error, not a guess."""
    group = make_group()
    group.start()
    run_to(group.samples[0], S.COMPLETED)
    with pytest.raises(IllegalTransition, match="no group status"):
        _ = group.status
    run_to(group.samples[1], S.COMPLETED)
    assert group.status is S.COMPLETED
    with pytest.raises(IllegalTransition, match="needs a member"):
        make_group(size=0)


def test_versions_are_those_of_all_members() -> None:
    """The staleness of a group looks at every token of every member."""  # P32
    group = make_group()
    group.start()
    for sample, version in zip(group.samples, (1, None), strict=True):
        sample.extend(sample.hand_out(), segment([1], version))
    assert group.versions() == {1, None}


def test_a_lease_and_its_end_leave_the_group_as_it_was() -> None:
    """Leasing and taking back changes the accounts and nothing else, however often."""
    ledger = Ledger()
    group = completed(ledger, "g", size=2)
    before = state_of(group)
    for _ in range(3):
        group.lease()
        assert (ledger.groups("leased"), ledger.samples("leased")) == (1, 2)
        group.unlease()
    assert state_of(group) == before


@pytest.mark.parametrize("end", ["consumed", "filtered", "expired", "failed"])
def test_an_end_releases_what_is_heavy(end: Settlement) -> None:  # P27 P28
    """Whatever a group ends as, its samples give up their routed experts; until then they count as its bytes."""
    handles, ledger = Handles(), Ledger()
    group = make_group(ledger, size=2)
    group.start()
    for sample in group.samples:
        attempt = sample.hand_out()
        stored = MemoryStore().put(np.zeros((4, 1, 1), np.uint8))
        sample.extend(attempt, segment([7, 8]), handles.hold(stored, kind="experts", holder=sample.sample_id))
        sample.transition(attempt, SampleStatus.GENERATED)
        sample.transition(attempt, SampleStatus.JUDGING)
        sample.grade(attempt, 1.0, {})
    group.finish(0.0)
    packed = sum(len(sample.packed or b"") for sample in group.samples)
    assert group.payload_bytes == packed + 8
    if end == "consumed":
        group.lease()
    group.settle(end, None if end == "consumed" else "why")
    assert not handles.live
    assert not handles.lost


def test_a_hand_back_keeps_them_and_a_new_beginning_does_not() -> None:  # P27
    """Tokens and rows go back together; a sample that begins again from its prompt has neither."""
    handles, ledger = Handles(), Ledger()
    group = make_group(ledger, size=1)
    [sample] = group.samples
    group.start()
    stored = MemoryStore().put(np.zeros((4, 1, 1), np.uint8))
    handle = handles.hold(stored, kind="experts", holder=sample.sample_id)
    sample.extend(sample.hand_out(), segment([7, 8]), handle)
    group.hand_back()
    assert sample.experts is handle
    group.start()
    sample.hand_out(partial=False)
    assert not handles.live
    assert sample.rows_missing == len(sample.prompt_ids) - 1
