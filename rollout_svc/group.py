"""One admission of a prompt: its samples, and the ledger account the group stands in.

Invariants:

- A group is in exactly one account; every move is told to the ledger in the same synchronous step.
- A group settles as one: CONSUMED, FILTERED, EXPIRED or FAILED takes every unsettled member along and revokes
  its attempt.
- A group is handed back with no member GENERATING, GENERATED or JUDGING: those become ABORTED, tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, Literal

import orjson

from rollout_svc.errors import IllegalTransition
from rollout_svc.gate import Lane
from rollout_svc.heavy import Heavy
from rollout_svc.ledger import SETTLED, Account, Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SETTLED_STATUSES, ResumeAt, Sample, SampleStatus
from rollout_svc.sample.state import SampleState

__all__ = ["Group", "Settlement"]

Settlement = Literal["consumed", "filtered", "expired", "failed"]

_MOVES: Final[dict[Account, frozenset[Account]]] = {
    "queued": frozenset({"in_flight", "expired", "failed"}),
    "in_flight": frozenset({"ready", "aborted", "filtered", "expired", "failed"}),
    "aborted": frozenset({"in_flight", "expired", "failed"}),
    "ready": frozenset({"leased", "filtered", "expired", "failed"}),
    "leased": frozenset({"ready", "consumed", "expired"}),
}
_STATUS_OF: Final[dict[Settlement, SampleStatus]] = {
    "consumed": SampleStatus.CONSUMED,
    "filtered": SampleStatus.FILTERED,
    "expired": SampleStatus.EXPIRED,
    "failed": SampleStatus.FAILED,
}
_HANDED_BACK_AT: Final[dict[SampleStatus, ResumeAt]] = {
    SampleStatus.GENERATING: "generate",
    SampleStatus.GENERATED: "judge",
    SampleStatus.JUDGING: "judge",
}


class Group:
    """The samples of one admission; see the module's invariants."""

    __slots__ = (
        "_ledger",
        "_versions",
        "account",
        "created_at",
        "cuts",
        "filter_failures",
        "group_id",
        "hand_backs",
        "handed_back_at",
        "lane",
        "not_before",
        "passed",
        "prompt",
        "ready_at",
        "reason",
        "recorded",
        "samples",
    )

    def __init__(  # noqa: D417
        self, *, group_id: str, prompt: Prompt, size: int, lane: Lane, ledger: Ledger, now: float = 0.0
    ) -> None:
        """Admit the group: from here on the ledger counts it.

        Args:
            group_id: unique per admission.
            size: number of samples (`prompt_repeat_k`), at least 1.
            now: monotonic seconds.
        """
        if size < 1:
            raise IllegalTransition(f"{group_id}: a group needs a member")
        self.group_id = group_id
        self.prompt = prompt
        self.lane: Lane = lane
        self.account: Account = "queued"
        self.created_at = now
        self.ready_at: float | None = None
        self.not_before = 0.0
        self.hand_backs = 0
        self.cuts = 0  # pauses that ended it before it was finished
        self.handed_back_at = now
        self.reason: str | None = None
        self.recorded = False  # its trajectory is handed over
        self.passed = False  # its filter kept it
        self.filter_failures = 0
        self._ledger = ledger
        self._versions: frozenset[int | None] | None = None
        self.samples = tuple(
            Sample(
                sample_id=f"{group_id}.{index}",
                group_id=group_id,
                index=index,
                prompt_ids=prompt.input_ids,
                ledger=ledger,
                meta=dict(prompt.meta),
            )
            for index in range(size)
        )
        ledger.admit(size, prompt.task)

    def __repr__(self) -> str:
        return f"<Group {self.group_id} {self.account} {[str(sample.status) for sample in self.samples]}>"

    @property
    def status(self) -> SampleStatus:
        """The group's common outcome.

        Raises:
            IllegalTransition: a member is unfinished: such a group has no status.
        """
        statuses = {sample.status for sample in self.samples}
        finished = SETTLED_STATUSES | {SampleStatus.COMPLETED}
        if len(statuses) != 1 or not statuses <= finished:
            raise IllegalTransition(f"{self.group_id} has no group status: members are {sorted(statuses)}")
        return next(iter(statuses))

    @property
    def settled(self) -> bool:
        """Whether the outcome is for good."""
        return self.account in SETTLED

    @property
    def complete(self) -> bool:
        """Whether every member is COMPLETED."""
        return all(sample.status is SampleStatus.COMPLETED for sample in self.samples)

    def versions(self) -> frozenset[int | None]:
        """Every weight version that made a token of a member; kept once the group is finished."""
        if self._versions is not None:
            return self._versions
        return frozenset(span.version for sample in self.samples for span in sample.all_versions)

    @property
    def oldest(self) -> float:
        """The oldest weight version of its tokens: -inf where one is unknown, inf where it has none."""
        versions = self.versions()
        return -inf if None in versions else min((v for v in versions if v is not None), default=inf)

    def newer_than(self, version: int) -> bool:
        """Whether a token of it was made by later weights than `version`."""
        return any(made_by is not None and made_by > version for made_by in self.versions())

    @property
    def weakest(self) -> float:
        """The version from which on a member has no token that is younger: inf where none has tokens.

        Where tokens of this version are too old to count, all of some member's are.
        """
        newest = (
            max((-inf if span.version is None else span.version for span in sample.all_versions), default=inf)
            for sample in self.samples
        )
        return min(newest, default=inf)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the members' encoded records, and of their routed experts."""
        return sum(
            len(sample.packed) + (0 if sample.experts is None else sample.experts.nbytes)
            for sample in self.samples
            if sample.packed is not None
        )

    @property
    def heavy_bytes(self) -> int:
        """Those of the routed experts among them."""
        owned = (sample.experts for sample in self.samples if sample.packed is not None)
        return sum(experts.nbytes for experts in owned if experts is not None)

    def encoded(self, record: Callable[[Sample, bytes], bytes] = lambda _, packed: packed) -> bytes:
        """The group's record in a batch, JSON; every member is COMPLETED.

        Args:
            record: gives a member's record as it is to be sent, where that is not as it is kept.

        Raises:
            IllegalTransition: a member is not.
        """
        members = [record(sample, sample.packed) for sample in self.samples if sample.packed is not None]
        if len(members) != len(self.samples):
            raise IllegalTransition(f"{self.group_id}: not every member is COMPLETED")
        head = {"group_id": self.group_id, "task": self.prompt.task, "prompt": self.prompt.as_json()}
        return b"".join((orjson.dumps(head)[:-1], b',"samples":[', b",".join(members), b"]}"))

    def start(self) -> None:
        """A task takes the group: queued or aborted -> in_flight."""
        self._move("in_flight")

    def finish(self, now: float) -> None:
        """Every member is COMPLETED: in_flight -> ready."""
        if not self.complete:
            raise IllegalTransition(f"{self.group_id}: not every member is COMPLETED")
        self._move("ready", source="in_flight")
        self.ready_at = now
        self._versions = self.versions()

    def hand_back(self, not_before: float = 0.0) -> None:
        """Return the group unfinished: in_flight -> aborted; running members become ABORTED, attempts revoked."""
        self._move("aborted")
        for sample in self.samples:
            resume_at = _HANDED_BACK_AT.get(sample.status)
            if resume_at is not None:
                sample.transition(sample.attempt, SampleStatus.ABORTED, reason="hand_back", resume_at=resume_at)
            if not sample.settled:
                sample.revoke()
        self.hand_backs += 1
        self.not_before = not_before

    def lease(self) -> None:
        """Lend the group to a trainer: ready -> leased."""
        self._move("leased")
        for sample in self.samples:
            sample.set_leased(leased=True)

    def unlease(self) -> None:
        """The lease ended without an ack: leased -> ready."""
        self._move("ready", source="leased")
        for sample in self.samples:
            sample.set_leased(leased=False)

    def settle(self, outcome: Settlement, reason: str | None = None, *, culprit: Sample | None = None) -> None:
        """End the group for good; every unsettled member goes along and loses its attempt.

        Args:
            outcome: the account it ends in.
            reason: typed reason; None only for consumed.
            culprit: the member that caused it; the others get `sibling_failed`.
        """
        status = _STATUS_OF[outcome]
        if outcome != "consumed" and not reason:
            raise IllegalTransition(f"{self.group_id}: {outcome} needs a reason")
        self._move(outcome)
        self.reason = reason
        for sample in self.samples:
            if sample.settled:
                continue
            own = culprit is None or sample is culprit
            sample.transition(sample.attempt, status, reason=reason if own else "sibling_failed")
            sample.revoke()

    def recall(
        self,
        samples: Sequence[SampleState],
        hand_backs: int,
        cuts: int,
        *,
        ready: bool,
        now: float,
        experts: Mapping[int, Heavy] | None = None,
    ) -> None:
        """Be what was noted in an earlier life: queued -> ready, or aborted, with each member as it was.

        Args:
            samples: of each member, none of them under way.
            hand_backs: how often it had come back unfinished.
            cuts: how many pauses had ended it.
            ready: every member is COMPLETED, and it was put.
            now: monotonic seconds.
            experts: routed experts, by member, of those that have some; the members' from now on.

        Raises:
            IllegalTransition: it is not freshly admitted, or not every member of a ready group is COMPLETED.
        """
        if self.account != "queued" or len(samples) != len(self.samples):
            raise IllegalTransition(f"{self.group_id}: {self.account} cannot be recalled")
        for sample, state in zip(self.samples, samples, strict=True):
            sample.recall(state, (experts or {}).get(sample.index))
        if ready and not self.complete:
            raise IllegalTransition(f"{self.group_id}: not every member is COMPLETED")
        self.account = "ready" if ready else "aborted"
        self._ledger.move_group("queued", self.account, self.prompt.task)
        self.hand_backs, self.cuts = hand_backs, cuts
        if ready:
            self.ready_at, self._versions = now, self.versions()

    def _move(self, to: Account, source: Account | None = None) -> None:
        """Change the account, before anything else changes: an illegal move changes nothing."""
        if to not in _MOVES.get(self.account, frozenset()) or source not in (None, self.account):
            raise IllegalTransition(f"{self.group_id}: {self.account} -> {to}")
        self._ledger.move_group(self.account, to, self.prompt.task)
        self.account = to
