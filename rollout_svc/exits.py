"""How a process ended, in words."""

from __future__ import annotations

import signal

__all__ = ["how_it_ended"]


def how_it_ended(code: int | None) -> str:
    """Say how a process ended, in words that fit after "it"."""
    if code is None:
        return "was lost with its leash"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
