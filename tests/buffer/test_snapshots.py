"""Snapshots and going on from them: whole or not there, of one moment, back to the step asked for."""

from __future__ import annotations

import hashlib
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.buffer.journal import notes
from rollout_svc.buffer.journal.reading import consumed_since, read_journal
from rollout_svc.buffer.journal.records import state_json
from rollout_svc.buffer.journal.schema import APPLICATION, PRAGMAS, VERSION, create_tables
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.recovered import Recovered
from rollout_svc.buffer.restoring import restore_journal
from rollout_svc.buffer.snapshots import NotASnapshotError, read_snapshot, write_snapshot
from rollout_svc.errors import ConfigError
from rollout_svc.sample.state import SampleState
from rollout_svc.segment import Segment, VersionSpan

FINGERPRINT: dict[str, Any] = {"tasks": {"t": {"prompts": "push"}}}
SIZE = 2
KEEP_STEPS = 3


class Kept:
    """A journal without a service: notes written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None)
        create_tables(self.connection, orjson.dumps(FINGERPRINT), 0.0)
        for pragma in PRAGMAS:
            self.connection.execute(pragma)
        self.tables = Tables(self.connection, KEEP_STEPS)
        self.groups = 0

    def write(self, *several: notes.Note) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        for note in several:
            self.tables.write(note)
        self.connection.execute("COMMIT")

    def admit(self, count: int = 1) -> tuple[str, ...]:
        """Admit groups `g0` and so on, of prompts `p0` and so on."""
        ids = tuple(f"g{number}" for number in range(self.groups, self.groups + count))
        self.groups += count
        for group_id in ids:
            prompt_id = f"p{group_id[1:]}"
            self.write(notes.Admitted(group_id, "t", prompt_id, b"{}", [1, 2], SIZE, int(group_id[1:]) + 1, None))
        return ids

    def lease(self, step: int, count: int = 1) -> None:
        """Admit, finish and lend a batch `b<step>`."""
        ids = self.admit(count)
        self.write(*(notes.Saved(group_id, ()) for group_id in ids))
        self.write(notes.Leased(f"b{step}", step, ids, 1e12, b"{}"))

    def consume(self, step: int, count: int = 1) -> None:
        """Lend a batch and acknowledge it."""
        first = self.groups
        self.lease(step, count)
        self.write(notes.Consumed(f"b{step}", step, tuple(f"g{n}" for n in range(first, first + count))))

    def snapshot(self, target: Path, step: int) -> None:
        write_snapshot(self.connection, target, step, lambda: None)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path / "journal.db")
    yield made
    made.connection.close()


def content(path: Path) -> Recovered:
    """What a service would go on from."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as found:
        return read_journal(found)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_one_file_with_everything(kept: Kept, tmp_path: Path) -> None:
    """It holds what was written before, in one file that needs nothing beside it, and says what it is."""
    kept.consume(0)
    kept.lease(1, 2)
    kept.admit(3)
    target = tmp_path / "elsewhere" / "snapshot.db"
    target.parent.mkdir()
    made = write_snapshot(kept.connection, target, 1, lambda: None)
    assert made == read_snapshot(target) == (1, target.stat().st_size, 5, 0)
    assert names(target.parent) == {"snapshot.db"}
    assert content(target) == read_journal(kept.connection)


def test_what_is_written_meanwhile_tears_nothing(kept: Kept, tmp_path: Path) -> None:
    """The journal goes on being written between two pieces of a copy: what the copy holds is of one moment."""
    blob = orjson.dumps("x" * 20_000)
    lines = {f"q{number}": blob for number in range(800)}  # 16 MB: some pieces
    kept.write(notes.Pushed("t", tuple(lines.items())))
    seen: list[int] = []

    def meanwhile() -> None:
        seen.append(len(seen))
        kept.consume(len(seen))
        kept.write(notes.Pushed("t", ((f"late{len(seen)}", blob),)))

    write_snapshot(kept.connection, tmp_path / "snapshot.db", 9, meanwhile)
    assert len(seen) > 2
    with closing(sqlite3.connect(tmp_path / "snapshot.db")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = read_journal(copy)
    settled = found.settled_groups["t"]["consumed"]
    known = found.pushed["t"].known - lines.keys()
    assert len(seen) - 1 <= settled <= len(seen)
    assert known == {f"late{number}" for number in range(1, settled + 1)} or len(known) == settled - 1
    assert found.settled_samples["consumed"] == SIZE * settled


def test_a_snapshot_replaces_only_a_snapshot(kept: Kept, tmp_path: Path) -> None:
    """A file of anybody else, the journal itself, and half a snapshot are left as they are."""
    good, notes_file, half = tmp_path / "snapshot.db", tmp_path / "notes.txt", tmp_path / "half.db"
    kept.snapshot(good, 0)
    notes_file.write_text("mine")
    half.write_bytes(good.read_bytes()[:3000])
    kept.consume(0)
    kept.snapshot(good, 1)
    assert read_snapshot(good).step == 1
    for other in (notes_file, half, kept.path):
        before = digest(other)
        with pytest.raises(FileExistsError):
            kept.snapshot(other, 2)
        assert digest(other) == before
    assert not any(name.endswith(".partial") for name in names(tmp_path))


def test_a_copy_that_is_ended_leaves_what_was_there(kept: Kept, tmp_path: Path) -> None:
    """A copy that is not finished leaves no file, and the older snapshot as it was."""
    target = tmp_path / "snapshot.db"
    kept.snapshot(target, 3)
    before = digest(target)
    kept.write(notes.Pushed("t", tuple((f"q{number}", b"x" * 20_000) for number in range(400))))

    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        write_snapshot(kept.connection, target, 4, stop)
    assert digest(target) == before
    assert not any("partial" in name for name in names(tmp_path))
    kept.snapshot(target, 4)  # and the journal's connection is as good as before


def test_a_full_disk_leaves_what_was_there(kept: Kept, tmp_path: Path) -> None:
    """Where the copy does not fit the older snapshot stays, nothing else does, and the journal goes on."""
    target = tmp_path / "snapshot.db"
    kept.snapshot(target, 3)
    before = digest(target)
    kept.write(notes.Pushed("t", tuple((f"q{number}", b"x" * 20_000) for number in range(100))))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises((OSError, sqlite3.Error)):
            kept.snapshot(target, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert digest(target) == before
    assert not any("partial" in name for name in names(tmp_path))
    kept.consume(0)
    kept.snapshot(target, 4)


# -- going on from it --------------------------------------------------------------------------------------------------


def test_going_on_gives_back_what_came_after_the_step(kept: Kept, tmp_path: Path) -> None:
    """Groups consumed at the step or later are prompts again, before those that waited, and in no total."""  # P31
    for step in range(4):
        kept.consume(step, step + 1)
    kept.write(notes.Settled(kept.admit()[0], "expired", again=True))
    kept.snapshot(tmp_path / "snapshot.db", 4)
    done = restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, 2)
    assert done == (2, 7, 0, 0)
    found = content(tmp_path / "new.db")
    assert [prompt.prompt_id for prompt in found.returned] == [f"p{number}" for number in range(3, 10)]
    assert [prompt.prompt_id for prompt in found.again] == ["p10"]
    assert found.settled_groups == {"t": {"consumed": 3, "expired": 1}}
    assert found.settled_samples == {"consumed": 6, "expired": 2}
    assert found.step == 1
    with closing(sqlite3.connect(tmp_path / "new.db")) as journal:
        assert consumed_since(journal, 2) == []
        assert len(consumed_since(journal, 1)) == 2


def test_what_comes_back_goes_before_a_tail_whose_first_prompts_have_left(kept: Kept, tmp_path: Path) -> None:
    """The tail's numbers begin higher by then: what was consumed is not taken for a part of it."""  # P31
    kept.consume(0, 2)
    for group_id in kept.admit(3):
        kept.write(notes.Settled(group_id, "expired", again=True))
    for prompt_id in ("p2", "p3"):
        kept.write(notes.Admitted(f"again-{prompt_id}", "t", prompt_id, b"{}", [1, 2], SIZE, None, None))
    kept.snapshot(tmp_path / "snapshot.db", 1)
    restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, 0)
    found = content(tmp_path / "new.db")
    assert [prompt.prompt_id for prompt in found.returned] == ["p0", "p1"]
    assert [prompt.prompt_id for prompt in found.again] == ["p4"]


def test_going_on_frees_what_was_lent_for_the_step(kept: Kept, tmp_path: Path) -> None:
    """What was lent for the step or later is ready again, in its order; an earlier lease stays."""
    for step in range(3):
        kept.lease(step, 2)
    kept.snapshot(tmp_path / "snapshot.db", 3)
    done = restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, 1)
    assert done == (1, 0, 4, 0)
    found = content(tmp_path / "new.db")
    assert [lease.batch_id for lease in found.leases] == ["b0"]
    assert [(group.group_id, group.account) for group in found.groups if group.account == "ready"] == [
        (f"g{number}", "ready") for number in range(2, 6)
    ]


def made_by(version: int, group_id: str, member: int) -> notes.Member:
    """A sample that was cut after two tokens of a version."""
    segment = Segment([1, 2], [-0.5, -0.5], (VersionSpan(version, 0, 2),))
    state = SampleState("ABORTED", resume_at="generate", finish_reason="abort", segments=(segment,))
    return notes.Member(group_id, member, state, state_json(state))


@pytest.mark.parametrize(("step", "redone"), [(3, 0), (2, 1), (1, 3)])
def test_tokens_of_weights_that_are_gone_are_not_gone_on_with(
    kept: Kept, tmp_path: Path, step: int, redone: int
) -> None:
    """Weights made after the step will be others of the same number: what they made is made again."""  # P32
    ready, unfinished = kept.admit(2)
    kept.write(notes.Saved(ready, (made_by(1, ready, 0), made_by(2, ready, 1))))
    kept.write(notes.Kept((made_by(2, unfinished, 0), made_by(3, unfinished, 1))))
    kept.snapshot(tmp_path / "snapshot.db", 3)
    done = restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, step)
    assert done.redone == redone
    found = {group.group_id: group for group in content(tmp_path / "new.db").groups}
    assert found[ready].account == ("ready" if step > 1 else "aborted")
    tokens = {group_id: [len(state.segments) for state in group.samples] for group_id, group in found.items()}
    assert tokens == {ready: [1, step > 1], unfinished: [step > 1, step > 2]}


def test_by_default_it_goes_on_from_the_snapshots_step(kept: Kept, tmp_path: Path) -> None:
    """Without a step it is the snapshot's own: nothing of before comes back."""
    kept.consume(0)
    kept.consume(1)
    kept.snapshot(tmp_path / "snapshot.db", 1)
    assert restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, None) == (1, 1, 0, 0)


def test_a_step_out_of_reach_is_refused(kept: Kept, tmp_path: Path) -> None:
    """A step whose prompts were forgotten, and one after the snapshot, are refused with the numbers."""
    for step in range(8):
        kept.consume(step)
    kept.snapshot(tmp_path / "snapshot.db", 8)
    for step, words in ((4, "step 4 and earlier"), (0, "step 4 and earlier"), (9, "made at step 8")):
        with pytest.raises(ConfigError, match=f"^--restore-step: .*{words}.* step {step}"):
            restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, step)
    assert "new.db" not in names(tmp_path)
    assert restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, 5).returned == 3


def test_the_journal_is_one_afterwards(kept: Kept, tmp_path: Path) -> None:
    """What came of a snapshot is a journal, and no snapshot; the snapshot is as it was."""
    kept.consume(0)
    kept.snapshot(tmp_path / "snapshot.db", 1)
    before = digest(tmp_path / "snapshot.db")
    restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, None)
    assert digest(tmp_path / "snapshot.db") == before
    with pytest.raises(NotASnapshotError):
        read_snapshot(tmp_path / "new.db")
    with closing(sqlite3.connect(tmp_path / "new.db")) as journal:
        assert journal.execute("PRAGMA application_id").fetchone() == (APPLICATION,)
        assert journal.execute("PRAGMA user_version").fetchone() == (VERSION,)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["new.db", "new.db-wal"])
def test_a_journal_that_is_there_is_kept(kept: Kept, tmp_path: Path, there: str) -> None:
    """Where there is a journal, or a part of one, the refusal names both files, and both stay."""
    kept.snapshot(tmp_path / "snapshot.db", 1)
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match=rf"^buffer\.path: \S+{there} is there already, and \S+snapshot\.db"):
        restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, None)
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_half_a_snapshot_is_refused(kept: Kept, tmp_path: Path, share: float) -> None:
    """A snapshot that was cut anywhere is refused in one line; it is as it was, and no journal is made."""  # P35
    kept.write(notes.Pushed("t", tuple((f"q{number}", b'"' + b"x" * 900 + b'"') for number in range(100))))
    kept.snapshot(tmp_path / "whole.db", 1)
    whole = (tmp_path / "whole.db").read_bytes()
    half = tmp_path / "half.db"
    half.write_bytes(whole[: int(share * len(whole))])
    before = digest(half)
    with pytest.raises(ConfigError) as refused:
        restore_journal(half, tmp_path / "new.db", FINGERPRINT, None)
    assert str(refused.value).startswith(f"--restore: {half} is ")
    assert len(str(refused.value).splitlines()) == 1
    assert digest(half) == before
    assert "new.db" not in names(tmp_path)


def test_a_damaged_snapshot_is_refused(kept: Kept, tmp_path: Path) -> None:
    """A page that was overwritten is found before anything is made of it."""
    kept.write(notes.Pushed("t", tuple((f"q{number}", b"x" * 900) for number in range(100))))
    kept.snapshot(tmp_path / "snapshot.db", 1)
    with (tmp_path / "snapshot.db").open("r+b") as file:
        file.seek(4096 * 40)  # among the lines
        file.write(b"\xff" * 4096)
    with pytest.raises(ConfigError, match=r"^--restore: .* is damaged: "):
        restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", FINGERPRINT, None)


def test_what_is_no_snapshot_is_refused(kept: Kept, tmp_path: Path) -> None:
    """A journal, a text, a folder, a file that is not there, another version and other settings: one line each."""
    kept.snapshot(tmp_path / "later.db", 1)
    with closing(sqlite3.connect(tmp_path / "later.db")) as later:
        later.execute(f"PRAGMA user_version={VERSION + 1}")
    (tmp_path / "text").write_text("no database")
    (tmp_path / "folder").mkdir()
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        create_tables(other, b"{}", 0.0)
    cases = {
        "other.db": "is not a snapshot",
        "text": "is not a snapshot",
        "folder": "is no file",
        "nothing": "is not there",
        "later.db": f"is a snapshot of version {VERSION + 1}; this service reads version {VERSION}",
    }
    for name, words in cases.items():
        with pytest.raises(ConfigError, match=f"^--restore: {tmp_path / name} {words}"):
            restore_journal(tmp_path / name, tmp_path / "new.db", FINGERPRINT, None)
    kept.snapshot(tmp_path / "snapshot.db", 1)
    with pytest.raises(ConfigError, match="written under other settings: task 't' is in the journal alone"):
        restore_journal(tmp_path / "snapshot.db", tmp_path / "new.db", {"tasks": {}}, None)
    assert "new.db" not in names(tmp_path)


def test_without_a_place_for_the_journal_it_is_refused(kept: Kept, tmp_path: Path) -> None:
    """`buffer.path` that is not set, or in no folder, is named."""
    kept.snapshot(tmp_path / "snapshot.db", 1)
    for journal, words in ((None, "is not set"), (tmp_path / "nowhere" / "new.db", "there is no folder")):
        with pytest.raises(ConfigError, match=rf"^buffer\.path: {words}"):
            restore_journal(tmp_path / "snapshot.db", journal, FINGERPRINT, None)
