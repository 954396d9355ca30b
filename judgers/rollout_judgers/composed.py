"""`composed`: a reward made of other judgers' rewards, each with a name and a weight."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from rollout_judgers.options import a_finite
from rollout_svc.errors import ConfigError
from rollout_svc.judging import Ask, JudgedSample, Reward

__all__ = ["Composed", "weighted"]


class Composed:
    """Add up the rewards of its parts, each times its weight; they judge at the same time, each where it belongs.

    Args:
        parts: by name, the settings of a judger as in a task, and `weight` (1). A part without `timeout_s` has that of
            the whole, which bounds what it does by itself as well.

    The first part that fails is the failure of the whole, under the part's name.
    """

    ask: Ask  # there before the first call

    def __init__(self, *, parts: Mapping[str, Mapping[str, Any]]) -> None:
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError.at("parts", f"{parts!r} is not a mapping of at least one judger")
        self.weights: dict[str, float] = {}
        self.others: dict[str, Any] = {}
        for name, settings in parts.items():
            if not isinstance(settings, Mapping):
                raise ConfigError.at(f"parts.{name}", f"{settings!r} is not a mapping, as in a task's judger")
            self.weights[str(name)] = a_finite(settings.get("weight", 1.0), f"parts.{name}.weight")
            self.others[f"parts.{name}"] = {key: value for key, value in settings.items() if key != "weight"}

    async def judge(self, sample: JudgedSample) -> Reward:
        """Have every part judge, and add up; what is made of a part's own parts is kept below its name."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = {
                    name: group.create_task(self._part(name, sample), name=f"judge-part:{sample.sample_id}:{name}")
                    for name in self.weights
                }
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return weighted({name: task.result() for name, task in asked.items()}, self.weights)

    async def _part(self, name: str, sample: JudgedSample) -> Reward:
        return await self.ask(f"parts.{name}", sample)


def weighted(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Add up rewards by weight; the parts are the rewards as they were, unweighted."""
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        parts[name] = reward.value
        parts |= {f"{name}.{below}": value for below, value in reward.parts.items()}
    return Reward(math.fsum(weights[name] * reward.value for name, reward in rewards.items()), parts)
