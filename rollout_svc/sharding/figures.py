"""The figures of a batch from those of its parts. Pure.

Invariant: they are what the same groups would have had in one batch of one service: means are weighted, deviations come
from sums of squares, histograms and counts are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_svc.rollout.rewards import RewardSum

__all__ = ["merge_figures"]

Figures = Mapping[str, Any]


def merge_figures(parts: Sequence[Figures], wait_s: float, pause_s: float) -> dict[str, Any]:
    """The record `metrics` of a batch.

    Args:
        parts: those of its parts, at least one.
        wait_s: seconds its take waited.
        pause_s: seconds the stage was paused since the batch before.
    """
    names = dict.fromkeys(name for part in parts for name in part["tasks"])
    return {
        **_describe(parts),
        "aborted": _sum(parts, "aborted"),
        "continued": _sum(parts, "continued"),
        "redone": _sum(parts, "redone"),
        "failed": _added(part["failed"] for part in parts),
        "settled": _added(part["settled"] for part in parts),
        "wait_s": round(wait_s, 6),
        "pause_s": round(pause_s, 6),
        "tasks": {name: _describe([part["tasks"][name] for part in parts if name in part["tasks"]]) for name in names},
        "max_token_staleness": parts[0].get("max_token_staleness"),
    }


def _describe(parts: Sequence[Figures]) -> dict[str, Any]:
    rewards = sum((_rewards(part) for part in parts), RewardSum())
    samples = _sum(parts, "samples")
    lengths = [part for part in parts if part["response_length_mean"] is not None]
    weighed = sum(part["response_length_mean"] * part["samples"] for part in lengths)
    return {
        "groups": _sum(parts, "groups"),
        "samples": samples,
        "reward_mean": rewards.mean if rewards.count else None,
        "reward_std": rewards.std if rewards.count else None,
        "reward_samples": rewards.count,
        "response_length_mean": weighed / samples if lengths and samples else None,
        "response_length_min": min((part["response_length_min"] for part in lengths), default=None),
        "response_length_max": max((part["response_length_max"] for part in lengths), default=None),
        "staleness": dict(sorted(_added(part["staleness"] for part in parts).items())),
        "mixed_versions": _sum(parts, "mixed_versions"),
        "masked_tokens": _sum(parts, "masked_tokens"),
    }


def _rewards(part: Figures) -> RewardSum:
    count = part["reward_samples"]
    return RewardSum(count, part["reward_mean"], part["reward_std"] ** 2 * count) if count else RewardSum()


def _sum(parts: Sequence[Figures], name: str) -> int:
    return sum(part[name] for part in parts)


def _added(histograms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(total)
