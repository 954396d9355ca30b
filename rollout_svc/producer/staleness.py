"""How old a group is when it is handed over, and whether it can still be: pure arithmetic.

Source of the rule: `step` counts trainer steps done when a batch is taken; a weight version counts the trainer steps
that were loaded. The staleness of a token is `step - version`; that of a group is the largest of its tokens'.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout_svc.group import Group

__all__ = ["doomed", "hand_over_order", "refusal", "staleness"]


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


def hand_over_order(group: Group) -> tuple[float, float]:
    """The key by which ready groups are handed over: the oldest version first, then who was ready first."""
    return group.oldest, group.ready_at or 0.0


def doomed(group: Group, step: int, max_staleness: int, *, partial: bool = True) -> str | None:
    """Why a group that is not finished can never be handed over at `step` or later, or None if it may be.

    Only tokens that stay are looked at: those of a sample that begins again are about to be dropped.

    Args:
        group: unfinished, running or not.
        step: the next one a batch is handed over at.
        max_staleness: the group bound, trainer steps.
        partial: whether a cut turn of its task is gone on with.
    """
    age = staleness(_lasting(group, partial=partial), step)
    if age is None:
        return "version_unknown"
    return "stale" if age > max_staleness else None


def _lasting(group: Group, *, partial: bool) -> set[int | None]:
    return {
        span.version for sample in group.samples if not sample.restarts(partial=partial) for span in sample.all_versions
    }
