"""What failed in code that people brought, and where in it: for those who read one line.

Invariant: whatever the error is made of, telling it does not fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["contained", "last_place", "told"]

_NOT_THEIRS: Final = (
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen",
)
"""Beginnings of the paths of code that people did not write for this."""
_FRAME: Final = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
"""A frame as `faulthandler` writes it."""
_TEXT: Final = 2000  # characters of an error's text
_TRACE: Final = 20_000  # and of its traceback, the end of which says most; error and all it came from are in it


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Make an error of what would end the whole service: an exit, or an interrupt that nobody sent.

    Raises:
        RuntimeError: in its place, with its traceback.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):  # errors as they should be, and ways to end a coroutine
        raise
    except SystemExit as error:
        raise RuntimeError(f"it called exit({error})").with_traceback(error.__traceback__) from error
    except BaseException as error:
        said = f"it raised {type(error).__name__}: {error}"
        raise RuntimeError(said).with_traceback(error.__traceback__) from error


def told(failed: BaseException) -> tuple[str, str]:
    """Return what an error says, with the place, and its traceback."""
    try:
        text = f"{type(failed).__name__}: {failed}"[:_TEXT]
    except BaseException:  # noqa: BLE001 - an object of their making
        text = type(failed).__name__
    try:
        frames = [
            (frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(failed.__traceback__)
        ]
        trace = "".join(traceback.format_exception(failed))[-_TRACE:]
    except BaseException:  # noqa: BLE001 - likewise
        return text, ""
    place = _place(list(reversed(frames)))
    return (f"{text} ({place})" if place else text), trace


def last_place(trace: str) -> str:
    """Return where a process was when it was ended, from what its fault handler wrote; empty where it wrote nothing."""
    first = trace.split("(most recent call first):", 1)[-1].split("\n\n", maxsplit=1)[0]
    return _place([(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(first)])


def _place(frames: list[tuple[str, int, str]]) -> str:
    """The innermost frame of their own code; where there is none, the innermost that is not ours."""
    theirs = [frame for frame in frames if not frame[0].startswith(_NOT_THEIRS)]
    others = [frame for frame in frames if not frame[0].startswith(_NOT_THEIRS[0])]
    for file, line, name in theirs or others:
        return f"{file}:{line} in {name}"
    return ""
