"""A value inside decoded JSON by its dotted path: `choices.0.message.content`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MISSING", "look_up"]

MISSING: Final = object()
"""Nothing is there; null is something."""


def look_up(value: Any, path: str) -> Any:
    """Follow a path through mappings, by key, and lists, by index; MISSING where it leads nowhere."""
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return MISSING
    return value
