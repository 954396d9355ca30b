"""A prompt line, checked: what a file, a source or a trainer hands in.

Invariants:

- A line that passed has exactly one of `messages`, `text`, `input_ids`, of the right type and of a kind that can become
  tokens here, and it can be written as JSON.
- Its id is given or the hash of its content, so that the same line has the same id in every run.
- A line that did not pass carries its problem and nothing of its content: whatever it held leaves no trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from rollout_svc.errors import Problem
from rollout_svc.tokens import NOT_IDS, Refused, are_ids

__all__ = ["PromptLine", "check_line", "read_line"]

_KEYS: Final = frozenset({"id", "messages", "text", "input_ids", "ground_truth", "meta", "engine_extra"})
_CONTENT: Final = ("messages", "text", "input_ids")
_ID_BYTES: Final = 12  # of the hash: no collision to be expected below a hundred million million lines


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line, ready to be admitted.

    Attributes:
        prompt_id: given, or the hash of the line; for a line that cannot be used, where it came from.
        content: its keys; empty for a line that cannot be used.
        problem: what is wrong with it, in one line; None for a good one.
    """

    prompt_id: str
    content: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_line(line: Any, refused: Refused, at: str) -> PromptLine:
    """Check what a stranger handed in; never raises for what is in it.

    Args:
        line: anything.
        refused: kinds of content that cannot become tokens here.
        at: where it came from, for people: `tasks.0.prompts.source.17`.
    """
    try:
        problem = check_line(line, refused)
        if problem is None:
            return PromptLine(_prompt_id(line), dict(line))
    except Exception as error:  # noqa: BLE001 - a mapping of somebody else's may raise whatever it likes
        problem = Problem("", f"cannot be read: {type(error).__name__}: {error}")
    where = f"{at}.{problem.path}" if problem.path else at
    return PromptLine(at, problem=_printable(f"{where}: {problem.message}"))


def check_line(line: Any, refused: Refused) -> Problem | None:
    """Return the first thing wrong with a line, at its field, or None.

    Args:
        line: the decoded JSON.
        refused: kinds of content that cannot become tokens here.
    """
    if not isinstance(line, Mapping):
        return Problem("", f"expected an object, not {type(line).__name__}")
    unknown = sorted(_printable(str(key)) for key in set(line) - _KEYS)
    if unknown:
        return Problem(unknown[0], "unknown key")
    given = [key for key in _CONTENT if line.get(key) is not None]
    if len(given) != 1:
        return Problem("", f"expected exactly one of {', '.join(_CONTENT)}, not {', '.join(given) or 'none'}")
    if given[0] in refused:
        return Problem(given[0], refused[given[0]].message)
    return _check_content(given[0], line[given[0]]) or _check_rest(line) or _check_json(line)


def _check_content(key: str, value: Any) -> Problem | None:
    if key == "text":
        return None if isinstance(value, str) else Problem(key, f"expected a string, not {type(value).__name__}")
    if not isinstance(value, list) or not value:
        return Problem(key, "expected a list with at least one element")
    if key == "input_ids" and not are_ids(value):
        return Problem(key, NOT_IDS)
    if key == "messages" and not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value):
        return Problem(key, "expected objects with a role")
    return None


def _check_rest(line: Mapping[str, Any]) -> Problem | None:
    if not isinstance(line.get("id", ""), str):
        return Problem("id", "expected a string")
    for key in ("meta", "engine_extra"):
        if not isinstance(line.get(key), Mapping | None):
            return Problem(key, "expected an object")
    return None


def _check_json(line: Mapping[str, Any]) -> Problem | None:
    """A line that did not come as JSON has to become some: it goes to an engine, and leaves with its batch."""
    for key, value in line.items():
        try:
            orjson.dumps(value)
        except TypeError as error:  # half a character, a number beyond 64 bits, an object of somebody's
            return Problem(key, f"cannot be written as JSON: {error}")
    return None


def _prompt_id(line: Mapping[str, Any]) -> str:
    """The line's own id, or the hash of everything in it."""
    given = line.get("id")
    if given:
        return str(given)
    content = orjson.dumps(dict(line), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(content).hexdigest()[: 2 * _ID_BYTES]


def _printable(text: str) -> str:
    """Text that can be written to a log: half characters become `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")
