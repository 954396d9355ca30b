"""A history cut after any note: what the next life finds is what there was."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.buffer.journal import Journal, notes
from rollout_svc.buffer.journal.reading import consumed_since, read_journal
from rollout_svc.buffer.journal.tables import REMEMBERED_LEASES, Tables
from rollout_svc.buffer.recovered import Position, Recovered
from rollout_svc.buffer.replay import Lease, ReplayBuffer
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.sample.state import SampleState
from tests.support.groups import completed, make_group, run_to, segment
from tests.support.journals import InlineJournal, memory_database

PROMPTS = 12
OPS = ("admit", "readmit", "grow", "complete", "hand_back", "save", "fail", "again", "lease", "ack", "expire", "push")


class History:
    """A buffer and its sources, driven by hand, with every note checked as it is written."""

    def __init__(self) -> None:
        self.journal = InlineJournal(memory_database())
        self.journal.inline.after = lambda _: self.check()
        self.ledger = Ledger()
        self.journal.ledger = self.ledger
        self.buffer = ReplayBuffer()
        self.open: list[Group] = []
        self.again: list[Prompt] = []
        self.gone: Counter[str] = Counter()
        self.kept: dict[str, SampleState] = {}
        self.used = self.pushed = self.batches = 0
        self.waiting: list[str] = []

    def check(self) -> None:
        """Every prompt is in exactly one place, whichever note was the last; samples are as they were kept."""
        found = self.journal.found()
        used = found.positions["file"].used if "file" in found.positions else 0
        places = Counter(f"f{n}" for n in range(used, PROMPTS))
        places.update(line for pushed in found.pushed.values() for line in pushed.lines)
        places.update(group.prompt.prompt_id for group in found.groups)
        places.update(prompt.prompt_id for prompt in found.again)
        everything = Counter(f"f{n}" for n in range(PROMPTS)) + Counter(f"q{n}" for n in range(self.pushed))
        assert places + self.gone == everything
        settled = Counter[str]()
        for counts in found.settled_groups.values():
            settled.update(counts)
        assert settled["failed"] + settled["consumed"] == self.gone.total()
        assert found.settled_samples == {outcome: 2 * number for outcome, number in settled.items()}
        for group in found.groups:
            for index, state in enumerate(group.samples):
                last = self.kept.get(f"{group.group_id}.{index}")
                assert state == (last.handed_back() if last is not None else SampleState())
        leased = {group_id for lease in found.leases for group_id in lease.group_ids}
        assert leased == {group.group_id for group in found.groups if group.account == "leased"}

    # -- what may happen ---------------------------------------------------------------------------------------

    def do(self, op: str, choice: int) -> None:
        """Do it, where there is anything to do it to."""
        getattr(self, f"_{op}")(choice)

    def _group(self, prompt: Prompt) -> Group:
        group_id = f"g{self.ledger.as_json()['groups']['admitted']}"
        group = Group(group_id=group_id, prompt=prompt, size=2, lane="train", ledger=self.ledger)
        self.open.append(group)
        group.start()
        return group

    def _admit(self, _: int) -> None:
        if self.waiting:
            prompt_id = self.waiting.pop(0)
            group = self._group(Prompt(prompt_id, "queue", [1]))
            self.journal.admitted(group, Position(self.pushed - len(self.waiting)))
        elif self.used < PROMPTS:
            group = self._group(Prompt(f"f{self.used}", "file", [1]))
            self.used += 1
            self.journal.admitted(group, Position(self.used, {"at": self.used}))

    def _readmit(self, _: int) -> None:
        if self.again:
            self.journal.admitted(self._group(self.again.pop(0)), None)

    def _push(self, _: int) -> None:
        prompt_id = f"q{self.pushed}"
        self.pushed += 1
        self.waiting.append(prompt_id)
        self.journal.pushed("queue", {prompt_id: {"id": prompt_id, "input_ids": [1]}})

    def _member(self, choice: int) -> Sample | None:
        members = [s for group in self.open for s in group.samples if s.status is not SampleStatus.COMPLETED]
        return members[choice % len(members)] if members else None

    def _keep(self, sample: Sample) -> None:
        self.kept[sample.sample_id] = sample.state()
        self.journal.kept(sample)

    def _grow(self, choice: int) -> None:
        sample = self._member(choice)
        if sample is not None and sample.status is not SampleStatus.ABORTED:
            if sample.status is SampleStatus.INIT:
                sample.hand_out()
            sample.extend(sample.attempt, segment([choice, 2]))
            self._keep(sample)

    def _complete(self, choice: int) -> None:
        sample = self._member(choice)
        if sample is not None and sample.status is SampleStatus.INIT:
            run_to(sample, SampleStatus.COMPLETED)
            self._keep(sample)

    def _hand_back(self, choice: int) -> None:
        if self.open:
            group = self.open[choice % len(self.open)]
            group.hand_back()
            unfinished = [sample for sample in group.samples if sample.status is not SampleStatus.COMPLETED]
            self.kept.update({sample.sample_id: sample.state() for sample in unfinished})
            self.journal.handed_back(group)
            group.start()

    def _save(self, _: int) -> None:
        for group in [group for group in self.open if group.complete]:
            self.open.remove(group)
            group.finish(0.0)
            asyncio.run(self.journal.save(group))
            self.buffer.put_ready(group)

    def _fail(self, choice: int) -> None:
        if self.open:
            group = self.open.pop(choice % len(self.open))
            group.settle("failed", "bad")
            self.gone[group.prompt.prompt_id] += 1
            self.journal.settled(group)

    def _again(self, choice: int) -> None:
        if self.open:
            group = self.open.pop(choice % len(self.open))
            group.settle("expired", "stale")
            self.again.append(group.prompt)
            self.journal.settled(group, again=True)

    def _lease(self, choice: int) -> None:
        ready = list(self.buffer.ready_groups())[: 1 + choice % 2]
        if ready:
            self.batches += 1
            lease = self.buffer.lease(f"b{self.batches}", self.batches, ready, 10.0 + choice % 3, {"n": choice})
            asyncio.run(_note_lease(self.journal, lease))

    def _ack(self, choice: int) -> None:
        if self.buffer.leases:
            lease = self.buffer.leases[choice % len(self.buffer.leases)]
            self.buffer.acknowledge(lease.batch_id)
            self.gone.update(group.prompt.prompt_id for group in lease.groups)
            self.journal.consumed(lease)

    def _expire(self, choice: int) -> None:
        for lease in self.buffer.expire_leases(10.0 + choice % 3):
            self.journal.unleased(lease)


async def _note_lease(journal: Journal, lease: Lease) -> None:
    journal.leased(lease)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7)), max_size=40))
def test_a_history_cut_anywhere_has_every_prompt_once(script: list[tuple[str, int]]) -> None:
    """The multiset of prompts is whole after every single note, and samples are as they were noted last."""  # P31
    history = History()
    for op, choice in script:
        history.do(op, choice)
    found = history.journal.found()
    order = [group.group_id for group in found.groups if group.account == "ready"]
    assert order == [group.group_id for group in history.buffer.ready_groups()]
    assert dict(found.ended) == dict(history.buffer._ended)
    assert found.late_discarded == history.ledger.late_discarded


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7)), max_size=40), st.integers(1, 9))
def test_notes_of_one_transaction_come_to_the_same(script: list[tuple[str, int]], at_once: int) -> None:
    """However many are written together, and though only a sample's last state is."""  # P31
    history, noted = History(), list[notes.Note]()
    history.journal.inline.after = noted.append
    for op, choice in script:
        history.do(op, choice)
    connection = memory_database()
    tables = Tables(connection, 64)
    for start in range(0, len(noted), at_once):
        tables.write(*noted[start : start + at_once])
    assert read_journal(connection) == history.journal.found()


@pytest.fixture
def journal() -> InlineJournal:
    """An empty journal in memory."""
    return InlineJournal(memory_database())


def admit(journal: InlineJournal, ledger: Ledger, group_id: str) -> Group:
    """Admit a group of one, COMPLETED, and save it."""
    group = completed(ledger, group_id)
    journal.admitted(group, Position(1))
    asyncio.run(journal.save(group))
    return group


async def lease_of(journal: InlineJournal, step: int, *groups: Group) -> Lease:
    """Lend groups as one batch."""
    for group in groups:
        group.lease()
    lease = Lease(f"b{step}", step, groups, asyncio.get_running_loop().time() + 60, {"reward_mean": 0.5})
    journal.leased(lease)
    return lease


def test_a_lease_ends_when_it_was_to_end(journal: InlineJournal) -> None:
    """Its end is wall-clock time, and its figures are kept: the same step is to give the same batch."""
    group = admit(journal, Ledger(), "g")
    asyncio.run(lease_of(journal, 3, group))
    [lease] = journal.found().leases
    assert (lease.batch_id, lease.step, lease.group_ids, lease.metrics) == ("b3", 3, ("g",), {"reward_mean": 0.5})
    assert lease.expires_at == pytest.approx(1060.0, abs=1.0)


def test_prompts_of_consumed_groups_are_kept_for_some_steps() -> None:
    """So that an earlier step can be restored; older ones are forgotten, so that the file does not grow for ever."""
    journal, ledger = InlineJournal(memory_database(), keep_steps=2), Ledger()
    for step in range(4):
        group = admit(journal, ledger, f"g{step}")
        journal.consumed(asyncio.run(lease_of(journal, step, group)))
    assert journal.found().step == 3
    rows = journal.connection.execute("SELECT group_id, step FROM consumed ORDER BY step").fetchall()
    assert rows == [("g2", 2), ("g3", 3)]
    assert [prompt.prompt_id for prompt in consumed_since(journal.connection, 3)] == ["p"]


def test_the_fate_of_leases_is_bounded(journal: InlineJournal) -> None:
    """As it is in memory."""
    tables = Tables(journal.connection, 64)
    for number in range(REMEMBERED_LEASES + 5):
        tables.write(notes.Consumed(f"b{number}", number, ()))
    ended = journal.found().ended
    assert len(ended) == REMEMBERED_LEASES
    assert ended[-1] == (f"b{REMEMBERED_LEASES + 4}", "acknowledged")


def test_a_sample_is_written_once_as_it_is(journal: InlineJournal) -> None:
    """Asked to keep what is kept already, the journal writes nothing; saving a group writes what is missing."""
    written: list[notes.Note] = []
    journal.inline.after = written.append
    group = make_group(size=2)
    journal.admitted(group, Position(1))
    for sample in group.samples:
        run_to(sample, SampleStatus.COMPLETED)
    journal.kept(group.samples[0])
    journal.kept(group.samples[0])
    asyncio.run(journal.save(group))
    assert [type(note) for note in written] == [notes.Admitted, notes.Kept, notes.Saved]
    saved: Any = written[-1]
    assert [member.member for member in saved.members] == [1]


def test_what_is_noted_of_a_group_that_ended_changes_nothing(journal: InlineJournal) -> None:
    """A sample of a settled group does not come back to life."""
    group = make_group(size=1)
    journal.admitted(group, Position(1))
    tables = Tables(journal.connection, 64)
    state = group.samples[0].state()
    tables.write(notes.Settled("g", "failed", again=False))
    tables.write(notes.Kept((notes.Member("g", 0, state, b"{}"),)))
    tables.write(notes.Settled("g", "failed", again=False))
    assert journal.found().groups == ()
    assert journal.found().settled_samples == {"failed": 1}
    assert journal.connection.execute("SELECT count(*) FROM samples").fetchone() == (0,)


def test_an_empty_journal_is_nothing(journal: InlineJournal) -> None:
    """There is nothing to go on from, and that can be told."""
    assert not journal.found()
    journal.versioned(3)
    assert journal.found()
    assert read_journal(journal.connection) == Recovered(version=3)
