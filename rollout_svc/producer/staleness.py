"""How old a group is when it is handed over: pure arithmetic.

Source of the rule: `step` counts trainer steps done when a batch is taken; a weight version counts the trainer steps
that were loaded. The staleness of a token is `step - version`; that of a group is the largest of its tokens'.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout_svc.group import Group

__all__ = ["hand_over_order", "refusal", "staleness"]


def staleness(versions: Iterable[int | None], step: int) -> int | None:
    """The largest `step - version`; None when a version is unknown. No tokens: 0."""
    known = list(versions)
    if any(version is None for version in known):
        return None
    return max((step - version for version in known if version is not None), default=0)


def refusal(group: Group, step: int, max_staleness: int) -> str | None:
    """Why a ready group may not be handed over at `step`, or None if it may."""
    age = staleness(group.versions(), step)
    if age is None:
        return "version_unknown"
    return "stale" if age > max_staleness else None


def hand_over_order(group: Group) -> tuple[int, float]:
    """The key by which ready groups are handed over: the oldest version first, then who was ready first."""
    known = [version for version in group.versions() if version is not None]
    return min(known, default=0), group.ready_at or 0.0
