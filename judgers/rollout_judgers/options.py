"""Checks of judgers' options: what cannot be used is a ConfigError at the option, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout_svc.errors import ConfigError

__all__ = ["a_count", "a_finite", "a_text", "texts_by_name"]


def a_finite(value: Any, option: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError.at(option, f"{value!r} is not a finite number")
    return float(value)


def a_count(value: Any, option: str) -> int:
    """Return a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError.at(option, f"{value!r} is not a whole number from 1 on")
    return value


def a_text(value: Any, option: str) -> str:
    """Return a text with something in it."""
    if not isinstance(value, str) or not value:
        raise ConfigError.at(option, f"{value!r} is not a text")
    return value


def texts_by_name(value: Any, option: str) -> dict[str, str]:
    """Return a mapping of texts; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(type(k) is str and type(v) is str for k, v in value.items()):
        raise ConfigError.at(option, "is not a mapping of texts by name")
    return dict(value)
