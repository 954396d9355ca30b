"""A file of lines: whole lines only, whatever fails and whenever the process ends, and none written over."""

from __future__ import annotations

import errno
import json
import os
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import TrajectoriesConfig
from rollout_svc.trajectories import LineFile, trajectory_problems

KB = 1024


def line(number: int, size: int = 20) -> bytes:
    """One line of about that many bytes."""
    return json.dumps({"n": number, "fill": "x" * max(0, size - 20)}).encode() + b"\n"


def numbers(path: Path) -> list[int]:
    """What is in a file; fails where a line is not whole."""
    text = path.read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(found)["n"] for found in text.splitlines()]


def files(path: Path) -> list[Path]:
    """The file and those set aside, oldest first."""
    aside = [path.with_name(f"{path.name}.{number}") for number in range(1, 100)]
    return [found for found in [*reversed(aside), path] if found.exists()]


@given(
    sizes=st.lists(st.integers(20, 700), max_size=40),
    max_files=st.none() | st.integers(1, 4),
    restarts=st.sets(st.integers(0, 39)),
)
def test_lines_are_in_order_and_whole_over_all_files(
    sizes: list[int], max_files: int | None, restarts: set[int]
) -> None:
    """With restarts anywhere: each file keeps to its size, no line is split or lost, the oldest files go first."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        file = LineFile(path, max_bytes=KB, max_files=max_files)
        for number, size in enumerate(sizes):
            if number in restarts:
                file.close()
                file = LineFile(path, max_bytes=KB, max_files=max_files)
            file.append(line(number, size))
        file.close()
        file.close()
        found = files(path)
        written = [number for one in found for number in numbers(one)]
        assert written == list(range(len(sizes)))[len(sizes) - len(written) :]
        assert all(one.stat().st_size <= KB for one in found)
        if max_files is None:
            assert len(written) == len(sizes)
        else:
            assert len(found) <= max_files
            assert len(found) == max_files or len(written) == len(sizes)


def test_a_line_longer_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    """A line is never split: one that is too long for any file is in a file whole."""
    path = tmp_path / "t"
    file = LineFile(path, max_bytes=KB)
    for number, size in enumerate((30, 5 * KB, 30)):
        file.append(line(number, size))
    assert [numbers(one) for one in files(path)] == [[0], [1], [2]]


def test_fewer_files_than_before(tmp_path: Path) -> None:
    """A restart with a smaller `max_files` drops the oldest at the next turn."""
    path = tmp_path / "t"
    file = LineFile(path, max_bytes=KB)
    for number in range(6):
        file.append(line(number, KB))
    file.close()
    assert len(files(path)) == 6
    LineFile(path, max_bytes=KB, max_files=2).append(line(6, KB))
    assert [numbers(one) for one in files(path)] == [[5], [6]]


@pytest.mark.parametrize("torn", range(1, 40))
def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path, torn: int) -> None:
    """P31: whatever a process had written of its last line, the next one begins after a whole line."""
    path = tmp_path / "t"
    last = line(1, 40)
    path.write_bytes(line(0) + last[:torn])
    LineFile(path, max_bytes=KB).append(line(2))
    whole = [1] if torn >= len(last) - 1 else []
    assert numbers(path) == [0, *whole, 2]


def test_a_torn_line_may_be_long(tmp_path: Path) -> None:
    """The end of the last whole line is found however far back it is, and where there is none."""
    path = tmp_path / "t"
    path.write_bytes(line(0) + line(1, 300_000)[:200_000])
    LineFile(path, max_bytes=10**9).append(line(2))
    assert numbers(path) == [0, 2]
    path.write_bytes(line(1, 300_000)[:200_000])
    LineFile(path, max_bytes=10**9).append(line(2))
    assert numbers(path) == [2]


def test_somebody_elses_file_is_left_as_it_is(tmp_path: Path) -> None:
    """What does not hold JSON objects is not written to: an error, and not a byte of it changed."""
    path = tmp_path / "t"
    path.write_bytes(b"dear diary")
    with pytest.raises(OSError, match="not a file of lines"):
        LineFile(path, max_bytes=KB).append(line(0))
    assert path.read_bytes() == b"dear diary"


class Disk:
    """Writes as `os.write` does, in small pieces, and fails where it is told to."""

    def __init__(self, *fails: int) -> None:
        self.fails = set(fails)
        self.writes = count()

    def write(self, fd: int, data: memoryview) -> int:
        if next(self.writes) in self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data[:7])


@given(st.sets(st.integers(0, 40)))
def test_a_full_disk_splits_no_line(fails: set[int]) -> None:
    """A write that fails anywhere leaves nothing of its line, and the next one is whole again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        file = LineFile(path, max_bytes=200, write=Disk(*fails).write)
        kept = []
        for number in range(8):
            try:
                file.append(line(number, 40))
            except OSError:
                continue
            kept.append(number)
        assert [number for one in files(path) for number in numbers(one)] == kept


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    """Whoever takes the file away has it; what comes next is in a new one."""
    path, taken = tmp_path / "t", tmp_path / "taken"
    file = LineFile(path, max_bytes=KB)
    file.append(line(0))
    path.rename(taken)
    file.append(line(1))
    path.unlink()
    file.append(line(2))
    assert (numbers(taken), numbers(path)) == ([0], [2])


def test_a_file_that_cannot_be_set_aside_goes_on(tmp_path: Path) -> None:
    """Where the names cannot be changed the lines still come, the trouble is known, and it ends when it can be done."""
    path, blocked = tmp_path / "t", tmp_path / "t.1"
    blocked.mkdir()
    (blocked / "busy").touch()
    file = LineFile(path, max_bytes=KB, max_files=2)
    for number in range(3):
        file.append(line(number, KB))
    assert isinstance(file.trouble, OSError)
    assert numbers(path) == [0, 1, 2]
    (blocked / "busy").unlink()
    blocked.rmdir()
    file.append(line(3))
    assert not file.trouble
    assert [numbers(one) for one in files(path)] == [[0, 1, 2], [3]]


# -- what is refused at the start ----------------------------------------------------------------------------


def problem(path: Path | None, **others: str | None) -> str | None:
    """What is said of a path; every problem is at `trajectories.path`."""
    found = trajectory_problems(TrajectoriesConfig(path=None if path is None else str(path)), others)
    assert all(one.path == "trajectories.path" for one in found)
    return found[0].message if found else None


def test_what_can_be_written_is_not_refused(tmp_path: Path) -> None:
    """P35: looking makes no file and changes none."""
    assert problem(None) is None
    assert problem(tmp_path / "new") is None
    assert not list(tmp_path.iterdir())
    old = tmp_path / "old"
    old.write_bytes(line(0))
    (tmp_path / "empty").touch()
    assert problem(old) is None
    assert problem(tmp_path / "empty") is None
    assert numbers(old) == [0]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """P35: a folder, a path in no folder, something that is no file, somebody else's file: each said in words."""
    assert problem(tmp_path) == f"not a file: {tmp_path}"
    assert problem(tmp_path / "no" / "t") == f"no such folder: {tmp_path / 'no'}"
    assert problem(Path("/dev/null")) == "not a file: /dev/null"
    other = tmp_path / "other"
    other.write_bytes(b"dear diary")
    assert "something else" in str(problem(other))
    assert problem(other / "t") == f"no such folder: {other}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_may_not_be_written_is_refused(tmp_path: Path) -> None:
    """P35: a folder or a file without the right to write is refused."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert problem(closed / "t") == f"cannot write in {closed}"
    old = tmp_path / "old"
    old.write_bytes(line(0))
    old.chmod(0o400)
    assert f"cannot write {old}" in str(problem(old))


def test_a_file_of_another_setting_is_refused(tmp_path: Path) -> None:
    """Prompts look like trajectories, and a journal is not there yet: both are known by their settings, links too."""
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "link"
    prompts.write_bytes(line(0))
    link.symlink_to(prompts)
    others = {"prompts": str(prompts), "journal": str(tmp_path / "new"), "none": None}
    assert problem(link, **others) == f"{link} is the file of prompts"
    assert problem(tmp_path / "new", **others) == f"{tmp_path / 'new'} is the file of journal"
    assert problem(tmp_path / "other", **others) is None
