"""The figures of a batch: what is in it, and what happened since the one before.

Invariants:

- The reward figures are raw: of the batch's own groups and of those that were finished and dropped since the batch
  before, by a filter, by age, or because their filter failed. Every group that finished is so counted once, and what a
  filter leaves does not make the model look better or worse than it is. `reward_samples` says of how many they are.
- What happened is told once: asking is what ends the period.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rollout_svc.group import Group
from rollout_svc.producer.masking import masked_tokens
from rollout_svc.producer.staleness import staleness
from rollout_svc.rollout.rewards import RewardSum
from rollout_svc.rollout.tally import Tally

__all__ = ["Figures"]


class Figures:
    """Keeps where the last batch's period ended."""

    def __init__(self, tally: Tally, paused_s: Callable[[], float]) -> None:
        """Begin now.

        Args:
            tally: what happens to samples and groups.
            paused_s: seconds for which the stage was paused, ever.
        """
        self._tally = tally
        self._paused_s = paused_s
        self._last = tally.snapshot()
        self._last_paused_s = 0.0

    def of(self, groups: list[Group], step: int, oldest: int | None, wait_s: float) -> dict[str, Any]:
        """The record `metrics` of a batch.

        Args:
            groups: of the batch.
            step: it is handed over at.
            oldest: version of the oldest tokens that count; None: all do.
            wait_s: seconds its take waited.
        """
        delta = self._tally.since(self._last)
        self._last = self._tally.snapshot()
        paused_s = self._paused_s()
        pause_s, self._last_paused_s = paused_s - self._last_paused_s, paused_s
        dropped = self._tally.take_dropped()
        tasks: dict[str, list[Group]] = {name: [] for name in dropped}
        for group in groups:
            tasks.setdefault(group.prompt.task, []).append(group)
        return {
            **_describe(groups, step, oldest, dropped.values()),
            "aborted": delta.aborted,
            "continued": delta.continued,
            "redone": delta.redone,
            "failed": dict(delta.failed),
            "settled": dict(delta.settled),
            "wait_s": round(wait_s, 6),
            "pause_s": round(pause_s, 6),
            "tasks": {
                name: _describe(members, step, oldest, [dropped[name]] if name in dropped else ())
                for name, members in tasks.items()
            },
        }


def _describe(groups: list[Group], step: int, oldest: int | None, dropped: Iterable[RewardSum]) -> dict[str, Any]:
    """Figures of some groups: lengths, staleness, and rewards, those of the groups that were dropped included."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = sum(dropped, RewardSum.of([sample.reward for sample in samples if sample.reward is not None]))
    lengths = [sample.response_length for sample in samples]
    ages = Counter(str(staleness(group.versions(), step)) for group in groups)
    return {
        "groups": len(groups),
        "samples": len(samples),
        "reward_mean": rewards.mean if rewards.count else None,
        "reward_std": rewards.std if rewards.count else None,
        "reward_samples": rewards.count,
        "response_length_mean": statistics.fmean(lengths) if lengths else None,
        "response_length_min": min(lengths, default=None),
        "response_length_max": max(lengths, default=None),
        "staleness": dict(sorted(ages.items())),
        "mixed_versions": sum(len({span.version for span in sample.weight_versions}) > 1 for sample in samples),
        "masked_tokens": sum(masked_tokens(sample, oldest) for sample in samples) if oldest is not None else 0,
    }
