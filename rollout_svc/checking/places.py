"""Where it was, in the code of whoever wrote the plugin: `file:line`.

Invariants:

- The innermost line that is neither ours nor Python's own; where there is none, of what is installed beside it.
- Looking changes nothing, and what cannot be looked into is an empty place, never an error.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = ["of_error", "of_frame", "of_here", "of_suspended", "of_thing", "split"]

_OURS: Final = str(Path(__file__).resolve().parent.parent)
_PYTHONS: Final = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"})
_INSTALLED: Final = "site-packages"
_PLACE: Final = re.compile(r"\((?P<file>[^():]+):(?P<line>\d+) in [^()]*\)")
"""As `blame` writes it."""
_MOST: Final = 200  # awaits that are followed


def of_error(error: BaseException) -> str:
    """The innermost line of theirs that an error went through."""
    return _innermost((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


def split(told: str) -> tuple[str, str]:
    """Part what the service says of an error from the place that it names."""
    found = _PLACE.search(told)
    if found is None:
        return told, ""
    return told[: found.start()].rstrip() + told[found.end() :], _told(found["file"], int(found["line"]))


def of_here() -> str:
    """The line of theirs that called, however many of ours are in between."""
    return of_frame(sys._getframe(1))  # noqa: SLF001 - the only way to see who calls


def of_frame(frame: FrameType | None) -> str:
    """The innermost line of theirs of a frame and those that called it."""
    places: list[tuple[str, int]] = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(reversed(places))


def of_suspended(coroutine: Any) -> str:
    """The innermost line of theirs in which a coroutine waits."""
    places = []
    for _ in range(_MOST):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            places.append((frame.f_code.co_filename, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        if coroutine is None:
            break
    return _innermost(places)


def of_thing(thing: Any) -> str:
    """Where a class, a function or the class of an object is written."""
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    candidates = (thing, type(thing))
    for candidate in candidates:
        try:
            file = inspect.getsourcefile(candidate)
            line = inspect.getsourcelines(candidate)[1]
        except (TypeError, OSError):
            continue
        if file is not None:
            return _told(file, line)
    return ""


def _innermost(places: Iterable[tuple[str, int]]) -> str:
    own = second = None
    for file, line in places:
        if file.startswith((_OURS, *_PYTHONS)) and _INSTALLED not in file.removeprefix(_OURS):
            continue
        if _INSTALLED in file:
            second = (file, line)
        else:
            own = (file, line)
    found = own or second
    return "" if found is None else _told(*found)


def _told(file: str, line: int) -> str:
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
