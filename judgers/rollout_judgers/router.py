"""`router`: another judger for each task, or for each source of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollout_judgers.dotted import MISSING, look_up
from rollout_svc.errors import ConfigError
from rollout_svc.judging import Ask, JudgedSample, JudgeFailed, Reward

__all__ = ["Router"]

_META: Final = "meta."


class Router:
    """Have the judger judge that the sample's task, or a value of its prompt's `meta`, stands for.

    Args:
        routes: by value, the settings of a judger as in a task.
        key: `task`, or `meta.` and a dotted path in the prompt's meta, such as `meta.data_source`.
        default: settings of the judger of every other value; without it, such a sample is a failure, not a 0.
    """

    ask: Ask  # there before the first call

    def __init__(
        self,
        *,
        routes: Mapping[str, Mapping[str, Any]],
        key: str = "task",
        default: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(routes, Mapping) or not routes:
            raise ConfigError.at("routes", f"{routes!r} is not a mapping of at least one judger")
        if key != "task" and not (isinstance(key, str) and key.startswith(_META) and len(key) > len(_META)):
            raise ConfigError.at("key", f"{key!r} is not task or meta.NAME")
        self.key = key
        self.routes = {str(value): f"routes.{value}" for value in routes}
        self.others: dict[str, Any] = {f"routes.{value}": settings for value, settings in routes.items()}
        self.default = None if default is None else "default"
        if default is not None:
            self.others["default"] = default

    async def judge(self, sample: JudgedSample) -> Reward:
        """Ask the one judger that this sample is for."""
        value = sample.task if self.key == "task" else look_up(sample.meta, self.key.removeprefix(_META))
        route = self.routes.get(str(value), self.default) if value is not MISSING else self.default
        if route is None:
            known = ", ".join(sorted(self.routes))
            told = f"{self.key} is missing" if value is MISSING else f"{self.key} is {value!r:.100}"
            raise JudgeFailed("no_route", f"{told}; there are: {known}, and no default")
        return await self.ask(route, sample)
