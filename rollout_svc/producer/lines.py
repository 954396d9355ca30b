"""A prompt line, checked: what a file, a source or a trainer hands in.

Invariant: a line that passed has exactly one of `messages`, `text`, `input_ids`, of the right type; its id is given or
the hash of its content, so that the same line has the same id in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson

__all__ = ["check_line", "prompt_id"]

_KEYS: Final = frozenset({"id", "messages", "text", "input_ids", "ground_truth", "meta", "engine_extra"})
_CONTENT: Final = ("messages", "text", "input_ids")
_ID_BYTES: Final = 12  # of the hash: no collision to be expected below a hundred million million lines


def check_line(line: Any, *, has_tokenizer: bool) -> tuple[str, str] | None:
    """Return `(field, message)` for the first thing wrong with a line, or None.

    Args:
        line: the decoded JSON.
        has_tokenizer: without one, only `input_ids` can be used.
    """
    if not isinstance(line, Mapping):
        return "", f"expected an object, not {type(line).__name__}"
    unknown = sorted(set(line) - _KEYS)
    if unknown:
        return str(unknown[0]), "unknown key"
    given = [key for key in _CONTENT if line.get(key) is not None]
    if len(given) != 1:
        return "", f"expected exactly one of {', '.join(_CONTENT)}, not {', '.join(given) or 'none'}"
    if given[0] != "input_ids" and not has_tokenizer:
        return given[0], "needs a tokenizer, and tokenizer.path is null"
    return _check_content(given[0], line[given[0]]) or _check_rest(line)


def _check_content(key: str, value: Any) -> tuple[str, str] | None:
    if key == "text":
        return None if isinstance(value, str) else (key, f"expected a string, not {type(value).__name__}")
    if not isinstance(value, list) or not value:
        return key, "expected a list with at least one element"
    if key == "input_ids" and not all(type(token) is int and token >= 0 for token in value):
        return key, "expected whole numbers from 0"
    if key == "messages" and not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value):
        return key, "expected objects with a role"
    return None


def _check_rest(line: Mapping[str, Any]) -> tuple[str, str] | None:
    if not isinstance(line.get("id", ""), str):
        return "id", "expected a string"
    for key in ("meta", "engine_extra"):
        if not isinstance(line.get(key) or {}, Mapping):
            return key, "expected an object"
    return None


def prompt_id(line: Mapping[str, Any]) -> str:
    """The line's own id, or the hash of everything in it."""
    given = line.get("id")
    if given:
        return str(given)
    content = orjson.dumps(dict(line), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(content).hexdigest()[: 2 * _ID_BYTES]
