"""What a memory watch says: accounts, those that grow, and what is new about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Account", "Growth", "News"]


@dataclass(frozen=True, slots=True)
class Growth:
    """An account that grows with the steps.

    Attributes:
        process: whose it is.
        account: which; `unaccounted` where resident memory grows and no account with it.
        bytes_per_step: how fast, over the last window.
        bytes: what it has now.
        grown_bytes: since `since_step`.
        since_step: the trainer's step at which it began, as far as that can be told.
        of_rss: its share of the growth of resident memory; None: that does not grow, or it is no part of that.
        again: whether it was said before, at half of this or less.
    """

    process: str
    account: str
    bytes_per_step: float
    bytes: int
    grown_bytes: int
    since_step: int
    of_rss: float | None
    again: bool

    def as_json(self) -> dict[str, Any]:
        """The record of one that grows."""
        return {
            "process": self.process,
            "account": self.account,
            "bytes_per_step": round(self.bytes_per_step),
            "bytes": self.bytes,
            "grown_bytes": self.grown_bytes,
            "since_step": self.since_step,
            "of_rss": None if self.of_rss is None else round(self.of_rss, 3),
        }


@dataclass(frozen=True, slots=True)
class News:
    """What a record has changed: leaks to be said, and those that ended."""

    growing: tuple[Growth, ...] = ()
    ended: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """One account: bytes now, at the first step, and its slope over the last window (None: too early to say)."""

    bytes: int
    first_bytes: int
    bytes_per_step: float | None
