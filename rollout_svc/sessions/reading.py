"""What the requests of both APIs have in common: fields checked by hand, each named by its path where it is wrong.

Invariants:

- Pure; every refusal is a `BadRequest` that names the field.
- Nothing that a client asks for is silently not done: it is done, refused, or a wish that changes no word (a cache, a
  tier, a label).
- Arguments of a call that are JSON read alike however they are spaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeGuard

import orjson

from rollout_svc.errors import BadRequest

__all__ = [
    "canonical",
    "count",
    "flag",
    "fraction",
    "items",
    "mapping",
    "non_empty",
    "part",
    "refuse_unless",
    "texts",
    "words",
]

_MOST: Final = 1 << 30
"""Tokens: more than any model makes in a turn."""


def mapping(value: object, path: str) -> dict[str, Any]:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        raise BadRequest.at(path, f"expected an object, got {_kind(value)}")
    return value


def items(value: object, path: str) -> list[Any]:
    """Check that a value is a list; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest.at(path, f"expected a list, got {_kind(value)}")
    return value


def non_empty(value: object, path: str) -> str:
    """Check that a value is a text of at least one character."""
    if not isinstance(value, str) or not value:
        raise BadRequest.at(path, f"expected a text that is not empty, got {_kind(value)}")
    return value


def texts(value: object, path: str) -> tuple[str, ...]:
    """Read a text, a list of texts, or nothing."""
    if isinstance(value, str):
        return (non_empty(value, path),)
    return tuple(non_empty(one, f"{path}.{place}") for place, one in enumerate(items(value, path)))


def words(value: object, path: str, *, between: str = "\n", kinds: Collection[str] = ("text",)) -> str:
    """Read what a message says: a text, or a list of parts that are texts.

    Args:
        value: the field.
        path: of it.
        between: what parts are put together with.
        kinds: of parts that are taken.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest.at(path, f"expected a text or a list of parts, got {_kind(value)}")
    return between.join(part(one, f"{path}.{place}", kinds) for place, one in enumerate(value))


def part(value: object, path: str, kinds: Collection[str] = ("text",)) -> str:
    """Read one part of what a message says."""
    given = mapping(value, path)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise BadRequest.at(path, f"{kind!r:.60} parts are not supported: text only")
    said = given.get(kind)
    if not isinstance(said, str):
        raise BadRequest.at(f"{path}.{kind}", f"expected a text, got {_kind(said)}")
    return said


def count(body: Mapping[str, Any], key: str) -> int | None:
    """Read a number of tokens; None where it is not given."""
    value = body.get(key)
    if value is None:
        return None
    if not _is_number(value) or not 1 <= value <= _MOST or value != int(value):
        raise BadRequest.at(key, f"expected an integer of at least 1, got {value!r:.40}")
    return int(value)


def fraction(body: Mapping[str, Any], key: str, most: float) -> float | None:
    """Read a number from 0 to `most`; None where it is not given."""
    value = body.get(key)
    if value is None:
        return None
    if not _is_number(value) or not 0 <= value <= most:
        raise BadRequest.at(key, f"expected a number from 0 to {most:g}, got {value!r:.40}")
    return float(value)


def flag(body: Mapping[str, Any], key: str, path: str | None = None) -> bool:
    """Read true or false; false where it is not given."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest.at(path or key, f"expected true or false, got {_kind(value)}")
    return bool(value)


def refuse_unless(
    body: Mapping[str, Any], key: str, allowed: Collection[Any], why: str, path: str | None = None
) -> None:
    """Refuse a field by name, unless it is not given, or one of the values that change nothing."""
    value = body.get(key)
    if value is None or any(type(value) is type(one) and value == one for one in allowed):
        return
    raise BadRequest.at(path or key, f"{why} (got {value!r:.60})")


def canonical(arguments: str) -> str:
    """Write arguments of a call as `tool_calls` does where they are JSON, and as they are where they are none."""
    try:
        return orjson.dumps(orjson.loads(arguments)).decode()
    except (ValueError, TypeError):  # no JSON; nested deeper than it can be written
        return arguments


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "an empty text" if value == "" else names.get(type(value), type(value).__name__)
