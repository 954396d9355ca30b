"""`function`: any `module:attr` as a judger."""

from __future__ import annotations

import inspect
from typing import Any

from rollout_svc.judging import JudgedSample
from rollout_svc.plugins import load_attr

__all__ = ["Function"]


class Function:
    """Call a function of one sample; an async one in the loop, any other in a process of its own.

    Args:
        function: `module:attr` of `f(sample) -> float | Reward`.
        kwargs: further keyword arguments for it.
    """

    def __new__(cls, *, function: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Make the async or the sync form: which one is known only once the function is imported."""
        target = load_attr(function)
        if not callable(target):
            raise TypeError(f"{function!r} is not callable")
        form = _AsyncFunction if inspect.iscoroutinefunction(target) else _SyncFunction
        return form(target, kwargs or {})


class _AsyncFunction:
    def __init__(self, function: Any, kwargs: dict[str, Any]) -> None:
        self.function = function
        self.kwargs = kwargs

    async def judge(self, sample: JudgedSample) -> Any:
        return await self.function(sample, **self.kwargs)


class _SyncFunction:
    def __init__(self, function: Any, kwargs: dict[str, Any]) -> None:
        self.function = function
        self.kwargs = kwargs

    def judge(self, sample: JudgedSample) -> Any:
        return self.function(sample, **self.kwargs)
