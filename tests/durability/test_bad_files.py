"""Files that cannot be used, as a user meets them: one line, exit code 2, and every file as it was."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_svc.buffer.journal.fingerprint import fingerprint_of
from rollout_svc.buffer.journal.opening import open_journal
from rollout_svc.buffer.snapshots import write_snapshot
from rollout_svc.configfile import config_from_mapping, load_config
from rollout_svc.recovery import Restore
from rollout_svc.serve import EXIT_BAD_CONFIG, serve
from tests.support.commands import run

CONFIG: dict[str, Any] = {
    "service": {"port": 0},
    "tasks": [{"name": "t", "prompts": {"push": True}}],
    "trainer": {"train_batch_size": 4, "prompt_repeat_k": 1},
    "buffer": {"path": "journal.db"},
}


class Folder:
    """A configuration, a journal of it that was left in order, and a snapshot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "service.yaml"
        self.journal = path / "journal.db"
        self.snapshot = path / "snapshot.db"
        self.config.write_text(yaml.safe_dump(CONFIG))
        with closing(open_journal(self.journal, fingerprint_of(config_from_mapping(CONFIG), {}))) as made:
            write_snapshot(made, self.snapshot, 3, lambda: None)

    def files(self) -> dict[str, str]:
        """What lies there, by content."""
        found = [path for path in self.path.rglob("*") if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def refused(self, capsys: pytest.CaptureFixture[str], restore: Restore | None = None, **changes: Any) -> str:
        """Start a service there: it ends at once with one line, and nothing has changed."""
        config = load_config(self.config, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])
        before = self.files()
        capsys.readouterr()
        assert serve(config, "error", restore) == EXIT_BAD_CONFIG
        assert self.files() == before
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1, told
        return told


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder of this test's own."""
    return Folder(tmp_path)


def _text(folder: Folder) -> None:
    folder.journal.write_text("notes of mine")


def _other_database(folder: Folder) -> None:
    folder.journal.unlink()
    with closing(sqlite3.connect(folder.journal)) as other:
        other.execute("CREATE TABLE mine (number)")


def _other_version(folder: Folder) -> None:
    with closing(sqlite3.connect(folder.journal)) as found:
        found.execute("PRAGMA user_version=999")


def _other_settings(folder: Folder) -> None:
    folder.config.write_text(yaml.safe_dump(CONFIG | {"tasks": [{"name": "other", "prompts": {"push": True}}]}))


def _half(folder: Folder) -> None:
    folder.journal.write_bytes(folder.journal.read_bytes()[:20_000])


def _snapshot(folder: Folder) -> None:
    folder.journal.write_bytes(folder.snapshot.read_bytes())


def _folder(folder: Folder) -> None:
    folder.journal.unlink()
    folder.journal.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_text, "is not a journal"),
        (_other_database, "is not a journal"),
        (_other_version, "is a journal of version 999"),
        (_other_settings, "was written under other settings: task 't' is in the journal alone"),
        (_half, "is half of a journal"),
        (_snapshot, "is a snapshot: name a file that is not there yet, and give the snapshot to --restore"),
        (_folder, "is no file"),
    ],
)
def test_a_journal_that_cannot_be_used(
    folder: Folder, capsys: pytest.CaptureFixture[str], spoil: Callable[[Folder], None], words: str
) -> None:
    """Another file, version or configuration, or half of one: the line says which and where."""  # P35
    spoil(folder)
    assert folder.refused(capsys).startswith(f"buffer.path: {folder.journal} {words}")


def test_a_journal_in_use(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """A second service on the same journal is refused, and the first goes on."""  # P35
    with closing(open_journal(folder.journal, fingerprint_of(config_from_mapping(CONFIG), {}))) as first:
        assert "is in use by another process" in folder.refused(capsys)
        first.execute("SELECT count(*) FROM groups")


@pytest.mark.parametrize("path", ["/sys/journal.db", "nowhere/journal.db"])
def test_a_place_that_cannot_be_written(folder: Folder, capsys: pytest.CaptureFixture[str], path: str) -> None:
    """A read-only place, and a folder that is not there."""  # P35
    told = folder.refused(capsys, buffer__path=path)
    assert told.startswith("buffer.path: ")
    assert path in told


def test_a_snapshot_that_cannot_be_used(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is not there, half of one, and one of an earlier step than the one asked for."""  # P35
    half = folder.path / "half.db"
    half.write_bytes(folder.snapshot.read_bytes()[:30_000])
    folder.journal.unlink()
    for restore, words in (
        (Restore(folder.path / "nothing.db"), f"--restore: {folder.path / 'nothing.db'} is not there"),
        (Restore(half), f"--restore: {half} is "),
        (Restore(folder.config), f"--restore: {folder.config} is not a snapshot"),
        (Restore(folder.snapshot, 4), f"--restore-step: {folder.snapshot} was made at step 3"),
    ):
        assert folder.refused(capsys, restore).startswith(words)


def test_the_command_line_names_both(folder: Folder) -> None:
    """`serve --restore` where a journal is: exit code 2, a line with both files, both as they were."""  # P35
    before = folder.files()
    done = run("serve", "--config", folder.config, "--restore", folder.snapshot)
    assert (done.returncode, done.stdout) == (2, "")
    there = f"buffer.path: {folder.journal} is there already, and {folder.snapshot} is restored only where"
    assert done.stderr.startswith(there)
    assert folder.files() == before


def test_a_step_without_a_snapshot_means_nothing(folder: Folder) -> None:
    """`--restore-step` alone is bad usage."""
    done = run("serve", "--config", folder.config, "--restore-step", "1")
    assert (done.returncode, done.stderr) == (2, "--restore-step: is for --restore\n")
