"""A file of lines that is set aside when it has grown large enough.

Invariants:

- A line is in the file whole, or not at all: what an error left of one is cut off, by the next life if not by this one.
- A line is in one file: the one before it is set aside first where it would grow past its size. Names are changed one
  by one, the oldest first, each atomically: whenever the process ends, no file has been written over.
- A file that somebody else moved away is not written any more: a new one is begun.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

import orjson

__all__ = ["LineFile"]

Write = Callable[[int, memoryview], int]

_CHUNK: Final = 65_536  # bytes looked at in one go for the end of the last whole line
_MODE: Final = 0o644


class LineFile:
    """Appends lines; blocks, so it belongs to a thread of its own. One process writes to one path."""

    def __init__(
        self, path: str | Path, *, max_bytes: int, max_files: int | None = None, write: Write = os.write
    ) -> None:
        """Begin; the file is opened, or made, by the first line.

        Args:
            path: where it is.
            max_bytes: size that it does not grow past, but for a single line that is longer.
            max_files: files that are kept, this one included; None: all.
            write: writes to a descriptor, as `os.write` does.
        """
        self.trouble: OSError | None = None
        """Why the last attempt to set the file aside failed; the lines go on into the same file."""
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._write = write
        self._fd = -1
        self._size = 0

    def __repr__(self) -> str:
        return f"<LineFile {self._path} {self._size} bytes>"

    def append(self, line: bytes) -> None:
        """Write one line, its line feed included.

        Raises:
            OSError: nothing of it is in the file.
        """
        self._be_open()
        if self._size and self._size + len(line) > self._max_bytes:
            self._set_aside()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._write(self._fd, rest) :]
        except OSError:
            self._cut()
            raise
        self._size += len(line)

    def close(self) -> None:
        """Have what was written on the disk, and close; idempotent.

        Raises:
            OSError: the disk did not take it.
        """
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        finally:
            self._let_go()

    def _be_open(self) -> None:
        if self._fd >= 0 and not self._is_ours():
            self._let_go()
        if self._fd < 0:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
            try:
                self._size = _mend(fd, self._path)
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd

    def _is_ours(self) -> bool:
        """Whether the path still leads to the open file."""
        try:
            there, here = self._path.stat(), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _cut(self) -> None:
        """Take back what was written of a line; where that fails too, the next opening does it."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            with contextlib.suppress(OSError):
                self._let_go()

    def _set_aside(self) -> None:
        """Begin a new file; where that cannot be done the old one goes on growing."""
        try:
            os.fsync(self._fd)
            self._shift()
        except OSError as error:
            self.trouble = error
            return
        self.trouble = None
        self._let_go()
        self._be_open()

    def _shift(self) -> None:
        """Give every file the next number, from the oldest on; those beyond the limit go."""
        last = next(number for number in count(1) if not self._numbered(number).exists()) - 1
        keep = last + 1 if self._max_files is None else self._max_files - 1
        for number in range(last, 0, -1):
            if number >= keep:
                self._numbered(number).unlink(missing_ok=True)
            else:
                self._numbered(number).replace(self._numbered(number + 1))
        if keep:
            self._path.replace(self._numbered(1))
        else:
            self._path.unlink()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _mend(fd: int, path: Path) -> int:
    """Make the file end with a whole line, as a process that was killed may have left half of one; returns its size.

    Raises:
        OSError: it is not a file of lines of JSON objects: it is left as it is.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    if os.pread(fd, 1, 0) != b"{":
        raise OSError(errno.EINVAL, "not a file of lines of JSON objects", str(path))
    if os.pread(fd, 1, size - 1) == b"\n":
        return size
    end = _end_of_lines(fd, size)
    tail = os.pread(fd, size - end, end)
    try:
        orjson.loads(tail)
    except ValueError:
        os.ftruncate(fd, end)
        return end
    os.write(fd, b"\n")
    return size + 1


def _end_of_lines(fd: int, size: int) -> int:
    """Where the last line feed is, plus one; 0 without any."""
    end = size
    while end > 0:
        start = max(0, end - _CHUNK)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
