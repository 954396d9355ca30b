"""Files that are no journal of ours, of this version and these settings: a clear line each, and not a byte changed."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.buffer.journal.fingerprint import differences, fingerprint_of
from rollout_svc.buffer.journal.journal import Journal
from rollout_svc.buffer.journal.opening import Kind, open_file, open_journal
from rollout_svc.errors import ConfigError
from tests.support.stage import make_config

MINE: dict[str, Any] = {"tasks": {"t": {"prompts": "push"}}, "tokenizer.path": None}


def whole(path: Path, fingerprint: dict[str, Any] = MINE) -> Path:
    """Make a journal."""
    open_journal(path, fingerprint).close()
    return path


def foreign(path: Path) -> None:
    """A database of something else."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE things (thing)")
    connection.close()


def newer(path: Path) -> None:
    """A journal of a version to come."""
    connection = sqlite3.connect(whole(path))
    connection.execute("PRAGMA user_version=9")
    connection.close()


def halved(path: Path) -> None:
    """A journal whose second half was never written."""
    data = whole(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


def scribbled(path: Path) -> None:
    """A journal with something else in its middle."""
    data = bytearray(whole(path).read_bytes())
    data[4096:] = b"\x55" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b""), "is not a journal"),
        (lambda path: path.write_text("prompts: 3\n" * 50), "is not a journal"),
        (lambda path: path.write_bytes(b"SQLite format 3\x00" + b"\x00" * 20), "is half of a journal"),
        (foreign, "is a database of something else"),
        (newer, "is a journal of version 9; this service writes version 2"),
        (halved, "is half of a journal: it has"),
        (scribbled, "is damaged"),
        (lambda path: whole(path, {"tasks": {"u": {"prompts": "push"}}}), "task 'u' is in the journal alone"),
        (lambda path: whole(path, MINE | {"tokenizer.path": "bytes"}), "tokenizer.path: bytes in the journal, null in"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_stays(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    """One line at `buffer.path` that says why; the file is what it was, and nothing is left beside it."""  # P35
    path = tmp_path / "journal.sqlite"
    make(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as told:
        Journal.open(path, MINE, keep_steps=4)
    [problem] = told.value.problems
    assert problem.path == "buffer.path"
    assert problem.message.startswith(str(path))
    assert words in problem.message
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    """A folder that is missing, a folder in its place, a file system that takes nothing."""  # P35
    for path, words in (
        (tmp_path / "no" / "journal", "there is no folder"),
        (tmp_path, "is no file"),
        (Path("/proc/journal"), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_journal(path, MINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_file_that_is_read_only_is_refused(tmp_path: Path) -> None:
    """And so is one in a folder where no log can be made."""  # P35
    path = whole(tmp_path / "journal")
    path.chmod(0o400)
    with pytest.raises(ConfigError, match="read-only"):
        open_journal(path, MINE)
    path.chmod(0o600)
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="read-only"):
        open_journal(path, MINE)
    tmp_path.chmod(0o700)


def test_one_at_a_time(tmp_path: Path) -> None:
    """A journal that is open is not opened again; once closed it is."""
    path = tmp_path / "journal"
    first = open_journal(path, MINE)
    with pytest.raises(ConfigError, match="is in use by another process"):
        open_journal(path, MINE)
    first.close()
    open_journal(path, MINE).close()


def test_what_was_written_last_is_there_after_a_kill(tmp_path: Path) -> None:
    """What is in the log beside the file belongs to it, whoever looked at the file first."""  # P31
    path = tmp_path / "journal"
    first = open_journal(path, MINE)
    first.execute("INSERT INTO meta VALUES ('version', 7)")
    killed = tmp_path / "killed"
    for end in ("", "-wal"):
        Path(f"{killed}{end}").write_bytes(Path(f"{path}{end}").read_bytes())
    first.close()
    with pytest.raises(ConfigError, match="other settings"):
        open_journal(killed, {"tasks": {}})
    second = open_journal(killed, MINE)
    assert second.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() == (7,)
    second.close()


def test_a_leftover_of_a_start_that_was_killed_is_no_hindrance(tmp_path: Path) -> None:
    """Half a journal never has the journal's name."""
    (tmp_path / "journal.new").write_bytes(b"half")
    open_journal(tmp_path / "journal", MINE).close()
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize("slower_goes_on", ["before it is linked", "after it is there"])
def test_two_that_make_it_at_once_make_one(tmp_path: Path, slower_goes_on: str) -> None:
    """P31, P35: whoever is slower finds the other's file, whole; neither links what the other has half made."""
    path, begun, go_on = tmp_path / "journal", threading.Event(), threading.Event()
    seen: list[str] = []

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        begun.set()
        assert go_on.wait(10)
        connection.execute("INSERT INTO meta VALUES ('created', 1)")
        connection.execute("PRAGMA application_id=77")
        connection.execute("PRAGMA user_version=1")

    def whole_then(connection: sqlite3.Connection) -> None:
        slower.start()
        assert begun.wait(10)
        go_on.set()
        half(connection)
        if slower_goes_on == "before it is linked":
            slower.join(10)
        else:
            go_on.clear()

    def opened(create: Callable[[sqlite3.Connection], None]) -> None:
        try:
            open_file(path, Kind("thing", 77, 1, {}), create, lambda _: None, "normal").close()
        except (ConfigError, sqlite3.Error, OSError) as error:
            seen.append(f"{type(error).__name__}: {error}")

    slower = threading.Thread(target=opened, args=(half,))
    opened(whole_then)
    go_on.set()
    slower.join(10)
    assert [told for told in seen if "in use by another process" not in told] == []
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_the_fingerprint_is_what_gives_positions_and_tokens_their_meaning() -> None:
    """Order, content and tokenizer belong to it; workers, sizes and places of files do not."""
    file = {"jsonl": "/a/prompts.jsonl", "seed": 1}
    one = fingerprint_of(make_config(prompts=file), {"t": "digest"})
    moved = {"jsonl": "/b/prompts.jsonl", "seed": 1}
    assert differences(one, fingerprint_of(make_config("http://e", prompts=moved), {"t": "digest"})) == []
    assert differences(one, fingerprint_of(make_config(prompts=file | {"seed": 2}), {"t": "digest"})) == [
        "task 't', prompts.seed: 1 in the journal, 2 in the configuration"
    ]
    assert differences(one, fingerprint_of(make_config(prompts=file), {"t": "other"})) == [
        "task 't', prompts.jsonl: digest in the journal, other in the configuration"
    ]
