"""Routed experts in the journal: there with their sample, byte for byte, and gone with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.buffer.journal import Journal, notes
from rollout_svc.buffer.journal import routing as routing_module
from rollout_svc.buffer.journal.reading import read_journal
from rollout_svc.buffer.journal.routing import join, split
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.recovered import Position
from rollout_svc.buffer.replay import Lease, ReplayBuffer
from rollout_svc.buffer.snapshots import restore, write_snapshot
from rollout_svc.errors import ConfigError
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.tensors import Handles
from tests.support.groups import make_group, make_prompt, segment
from tests.support.journals import InlineJournal, memory_database
from tests.support.routed import own, ready_group, routing

OPS = ("admit", "grow", "bare", "complete", "hand_back", "redo", "keep", "save", "fail", "lease", "ack", "expire")


def rows_of(connection: Any) -> int:
    """Rows of routed experts in a journal."""
    return int(connection.execute("SELECT count(*) FROM experts").fetchone()[0])


class History:
    """Samples with routed experts driven by hand, their journal held against what was noted, note by note."""

    def __init__(self) -> None:
        self.journal = InlineJournal(memory_database())
        self.notes: list[notes.Note] = []
        self.journal.inline.after = self._written
        self.ledger, self.handles, self.buffer = Ledger(), Handles(), ReplayBuffer()
        self.journal.ledger = self.ledger
        self.open: list[Group] = []
        self.noted: dict[str, bytes | None] = {}
        self.made = self.batches = 0

    def _written(self, note: notes.Note) -> None:
        self.notes.append(note)
        found = {
            f"{group.group_id}.{index}": None if state.experts is None else state.experts.tobytes()
            for group in self.journal.found().groups
            for index, state in enumerate(group.samples)
        }
        assert {key: value for key, value in found.items() if value is not None} == {
            key: value for key, value in self.noted.items() if value is not None and key in found
        }
        alive = {f"{group_id}.{m}" for group_id, m in self.connection.execute("SELECT group_id, member FROM experts")}
        assert alive <= found.keys()

    @property
    def connection(self) -> Any:
        """Of the journal."""
        return self.journal.connection

    def do(self, op: str, choice: int) -> None:
        """Do it, where there is anything to do it to."""
        getattr(self, f"_{op}")(choice)

    def _member(self, choice: int, *statuses: SampleStatus) -> Sample | None:
        members = [s for group in self.open for s in group.samples if s.status in statuses]
        return members[choice % len(members)] if members else None

    def _remember(self, *samples: Sample) -> None:
        """What the next note about them is to leave in the file."""
        for sample in samples:
            self.noted[sample.sample_id] = None if sample.experts is None else sample.experts.read().tobytes()

    def _admit(self, _: int) -> None:
        group_id = f"g{self.made}"
        self.made += 1
        group = Group(group_id=group_id, prompt=make_prompt(), size=2, lane="train", ledger=self.ledger)
        group.start()
        self.open.append(group)
        self.journal.admitted(group, Position(self.made))

    def _grow(self, choice: int, *, routed: bool = True) -> None:
        sample = self._member(choice, SampleStatus.INIT, SampleStatus.GENERATING, SampleStatus.ABORTED)
        if sample is None:
            return
        if sample.status is not SampleStatus.GENERATING:
            sample.hand_out()
        rows = len(sample.prompt_ids) + sample.response_length + choice
        experts = own(self.handles, routing(f"{sample.sample_id}/{choice}", rows)) if routed else None
        sample.extend(sample.attempt, segment([choice] * (choice + 1)), experts)
        if choice % 2:
            self._remember(sample)
            self.journal.kept(sample)

    def _bare(self, choice: int) -> None:
        """Tokens came without their rows: those that there were stay."""
        self._grow(choice, routed=False)

    def _complete(self, choice: int) -> None:
        sample = self._member(choice, SampleStatus.GENERATING)
        if sample is not None:
            for status in (SampleStatus.GENERATED, SampleStatus.JUDGING):
                sample.transition(sample.attempt, status)
            sample.grade(sample.attempt, 1.0, {})
            if choice % 2:
                self._remember(sample)
                self.journal.kept(sample)

    def _keep(self, choice: int) -> None:
        for group in self.open[choice % 3 :]:
            for sample in group.samples:
                if sample.status is not SampleStatus.INIT:
                    self._remember(sample)
                    self.journal.kept(sample)

    def _hand_back(self, choice: int) -> None:
        if self.open:
            group = self.open[choice % len(self.open)]
            group.hand_back()
            self._remember(*group.samples)
            self.journal.handed_back(group)
            group.start()

    def _redo(self, choice: int) -> None:
        sample = self._member(choice, SampleStatus.GENERATING)
        if sample is not None:
            sample.transition(sample.attempt, SampleStatus.INIT, reason="failed")
            assert sample.experts is None

    def _save(self, _: int) -> None:
        for group in [group for group in self.open if group.complete]:
            self.open.remove(group)
            group.finish(0.0)
            self._remember(*group.samples)
            asyncio.run(self.journal.save(group))
            self.buffer.put_ready(group)

    def _fail(self, choice: int) -> None:
        if self.open:
            group = self.open.pop(choice % len(self.open))
            group.settle("failed", "bad")
            self.journal.settled(group)

    def _lease(self, choice: int) -> None:
        ready = list(self.buffer.ready_groups())[: 1 + choice % 2]
        if ready:
            self.batches += 1
            asyncio.run(noted(self.journal, self.buffer.lease(f"b{self.batches}", self.batches, ready, 10.0)))

    def _ack(self, choice: int) -> None:
        if self.buffer.leases:
            lease = self.buffer.leases[choice % len(self.buffer.leases)]
            self.buffer.acknowledge(lease.batch_id)
            self.journal.consumed(lease)

    def _expire(self, _: int) -> None:
        for lease in self.buffer.expire_leases(10.0):
            self.journal.unleased(lease)


async def noted(journal: Journal, lease: Lease) -> None:
    """Note a lease, in a loop."""
    journal.leased(lease)


script = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(script)
def test_a_history_cut_anywhere_has_the_routing_of_every_sample(script: list[tuple[str, int]]) -> None:
    """After every single note the file has what each sample had when it was noted, and nothing of what has settled."""
    history = History()  # P27 P28 P31
    for op, choice in script:
        history.do(op, choice)


@settings(max_examples=40, deadline=None)
@given(script, st.integers(1, 9))
def test_notes_of_one_transaction_come_to_the_same(script: list[tuple[str, int]], at_once: int) -> None:
    """However many are written together: routed experts that only the first of them brought are there all the same."""
    history = History()  # P31
    for op, choice in script:
        history.do(op, choice)
    connection = memory_database()
    tables = Tables(connection, 64)
    for start in range(0, len(history.notes), at_once):
        tables.write(*history.notes[start : start + at_once])
    query = "SELECT group_id, member, piece, dtype, tokens, layers, top_k, data FROM experts ORDER BY 1, 2, 3"
    assert connection.execute(query).fetchall() == history.connection.execute(query).fetchall()


@settings(deadline=None)
@given(st.integers(0, 40), st.sampled_from(["uint8", "uint16"]), st.integers(1, 64))
def test_an_array_is_what_it_was(rows: int, dtype: str, piece_bytes: int) -> None:
    """Of any size, in any number of pieces; a piece that is missing or foreign is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_module, "PIECE_BYTES", piece_bytes)
        experts = routing("a", rows, dtype)
        pieces = list(split(experts))
    found = join(pieces)
    assert (found.dtype, found.shape, found.tobytes()) == (experts.dtype, experts.shape, experts.tobytes())
    assert not found.flags.writeable
    for spoilt in (pieces[:-1], pieces[1:], [*pieces, pieces[-1]]):
        if spoilt and len(pieces) > 1:
            with pytest.raises(ValueError, match="routed experts"):
                join(spoilt)
    with pytest.raises(ValueError, match="routed experts"):
        join([pieces[0]._replace(tokens=rows + 1), *pieces[1:]])


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.uint8), np.zeros((1, 1, 1), np.int64)])
def test_what_is_no_routing_is_not_written(array: Any) -> None:
    """Two dimensions, or another dtype."""
    with pytest.raises(ValueError, match="routed experts of"):
        list(split(array))


def test_large_and_empty_arrays_are_read_again() -> None:
    """Several pieces in the file, and a sample of one token, which has no row."""
    journal, handles, group = InlineJournal(memory_database()), Handles(), make_group(size=2)
    journal.admitted(group, Position(1))
    large, empty = routing("large", 5 * 2**20 // 6), routing("empty", 0, "uint16")
    for sample, experts in zip(group.samples, (large, empty), strict=True):
        sample.hand_out()
        sample.extend(sample.attempt, segment([1]), own(handles, experts))
        journal.kept(sample)
    assert rows_of(journal.connection) == 5 + 1
    states = journal.found().groups[0].samples
    for state, experts in zip(states, (large, empty), strict=True):
        assert (state.experts.dtype, state.experts.shape) == (experts.dtype, experts.shape)
        assert state.experts.tobytes() == experts.tobytes()


def test_what_did_not_change_is_not_written_again() -> None:
    """Tokens that came without rows bring their sample into the file again, and leave its experts where they lie."""
    journal, handles, group = InlineJournal(memory_database()), Handles(), make_group(size=1)
    written: list[notes.Note] = []
    journal.inline.after = written.append
    journal.admitted(group, Position(1))
    [sample] = group.samples
    sample.hand_out()
    sample.extend(sample.attempt, segment([1, 2]), own(handles, routing("a", 4)))
    journal.kept(sample)
    sample.extend(sample.attempt, segment([3]))
    journal.kept(sample)
    sample.extend(sample.attempt, segment([4]), own(handles, routing("b", 6)))
    journal.kept(sample)
    journal.kept(sample)
    group.start()
    group.hand_back()
    journal.handed_back(group)
    members = [note.members[0] for note in written if isinstance(note, notes.Kept | notes.HandedBack)]
    assert [member.routed for member in members] == [True, False, True, False]
    assert [member.state.experts is None for member in members] == [False, True, False, True]
    assert journal.found().groups[0].samples[0].experts.tobytes() == routing("b", 6).tobytes()


def test_what_is_noted_may_be_released_before_it_is_written(tmp_path: Path) -> None:
    """The thread writes what was there when it was noted, though the sample is consumed by then."""

    async def live() -> list[notes.Note]:
        journal, ledger, handles = Journal.open(tmp_path / "j.db", {}, keep_steps=64), Ledger(), Handles()
        queued: list[notes.Note] = []
        writer = journal.start()
        put, writer.put = writer.put, queued.append  # type: ignore[method-assign,assignment]
        group = ready_group(ledger, handles, "g", size=1)
        journal.admitted(group, Position(1))
        journal._note(notes.Saved("g", journal._members(group.samples)))
        group.lease()
        group.settle("consumed")
        assert handles.live == {}
        for note in queued:
            put(note)
        await journal.flush()
        found = await writer.run(read_journal)
        assert found.groups[0].samples[0].experts.tobytes() == routing("g.0", 6).tobytes()
        await journal.close()
        return queued

    assert len(asyncio.run(live())) == 2


def test_a_redone_sample_of_an_earlier_life_loses_its_routing() -> None:
    """What it had been noted with is not mixed with its new tokens."""
    first, handles, group = InlineJournal(memory_database()), Handles(), make_group(size=1)
    first.admitted(group, Position(1))
    [sample] = group.samples
    sample.hand_out()
    sample.extend(sample.attempt, segment([1, 2]), own(handles, routing("a", 4)))
    first.kept(sample)
    second, again = InlineJournal(first.connection), make_group(size=1)
    again.recall(second.found().groups[0].samples, 0, 0, ready=False, now=0.0)  # without: nobody made a handle
    [sample] = again.samples
    second.handed_back(again)
    assert rows_of(second.connection) == 0


@pytest.mark.parametrize("outcome", ["filtered", "failed", "expired"])
def test_what_settles_without_a_trainer_leaves_nothing(outcome: Any) -> None:
    """No routed experts of it are in the file, nor alive."""  # P27 P28
    journal, ledger, handles = InlineJournal(memory_database()), Ledger(), Handles()
    journal.ledger = ledger
    group = make_group(ledger, size=1)
    journal.admitted(group, Position(1))
    group.start()
    sample = group.samples[0]
    sample.hand_out()
    sample.extend(sample.attempt, segment([1]), own(handles, routing("a", 3)))
    journal.kept(sample)
    assert rows_of(journal.connection) == 1
    group.settle(outcome, "some reason")
    journal.settled(group)
    assert rows_of(journal.connection) == 0
    assert handles.live == {}


def test_where_there_are_none_nothing_is_asked() -> None:
    """A journal without routed experts executes the statements it always did."""
    journal, ledger = InlineJournal(memory_database()), Ledger()
    said: list[str] = []
    journal.connection.set_trace_callback(said.append)
    for number in range(3):
        group = ready_group(ledger, Handles(), f"g{number}", routed=False)
        journal.admitted(group, Position(number))
        asyncio.run(journal.save(group))
        group.lease()
        group.settle("consumed")
        journal.consumed(Lease(f"b{number}", number, (group,), 0.0))
    assert [line for line in said if "experts" in line] == ["SELECT EXISTS (SELECT 1 FROM experts)"]


def test_a_snapshot_has_them(tmp_path: Path) -> None:
    """They are in the copy, and gone from it where their sample begins again."""
    journal, ledger, handles = InlineJournal(memory_database()), Ledger(), Handles()
    for number, version in enumerate((0, 5)):
        group = make_group(ledger, size=1, group_id=f"g{number}")
        journal.admitted(group, Position(1))
        sample = group.samples[0]
        sample.hand_out()
        sample.extend(sample.attempt, segment([1], version), own(handles, routing(f"g{number}", 3)))
        journal.kept(sample)
    write_snapshot(journal.connection, tmp_path / "snapshot", 6, lambda: None)
    for step, there in ((6, [True, True]), (3, [True, False])):
        restore(tmp_path / "snapshot", tmp_path / f"{step}.db", {}, step)
        life = Journal.open(tmp_path / f"{step}.db", {}, keep_steps=64)
        found = [group.samples[0].experts for group in life.recover().groups]
        assert [experts is not None for experts in found] == there
        assert found[0].tobytes() == routing("g0", 3).tobytes()
        assert rows_of(life._connection) == sum(there)
        life._connection.close()


def test_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    """A file without the table is no file of this version."""  # P35
    path = tmp_path / "old.db"
    Journal.open(path, {}, keep_steps=64)._connection.close()
    data = bytearray(path.read_bytes())
    data[60:64] = (1).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="version 1; this service writes version 2"):
        Journal.open(path, {}, keep_steps=64)


def test_a_piece_that_is_missing_is_damage(tmp_path: Path) -> None:
    """A start says so, and does not go on with half of a routing."""  # P35
    path = tmp_path / "j.db"
    life = Journal.open(path, {}, keep_steps=64)
    tables, handles = Tables(life._connection, 64), Handles()
    sample = make_group(size=1).samples[0]
    sample.hand_out()
    sample.extend(sample.attempt, segment([1]), own(handles, routing("a", 2**20)))
    prompt = Prompt("p", "t", [1])
    tables.write(notes.Admitted("g", "t", "p", b'{"content":null}', prompt.input_ids, 1, 1, None))
    tables.write(notes.Kept((notes.Member("g", 0, sample.state(), b"{}", routed=True),)))
    life._connection.execute("DELETE FROM experts WHERE piece = 1")
    life._connection.close()
    with pytest.raises(ConfigError, match=r"is damaged: ValueError: routed experts"):
        Journal.open(path, {}, keep_steps=64)
