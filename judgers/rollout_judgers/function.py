"""`function`: any `module:attr` as a judger."""

from __future__ import annotations

import inspect
from typing import Any

from rollout_svc.judging import JudgedSample
from rollout_svc.plugins import load_attr

__all__ = ["Function"]


class Function:
    """Call a function of one sample, or of a group; an async one in the loop, any other in a process of its own.

    Args:
        function: `module:attr` of `f(sample) -> float | Reward`.
        kwargs: further keyword arguments for it.
        group: it is `f(samples) -> list` of those, one for each, in order.
    """

    def __new__(cls, *, function: str, kwargs: dict[str, Any] | None = None, group: bool = False) -> Any:
        """Make the form it needs: which one is known only once the function is imported."""
        target = load_attr(function)
        if not callable(target):
            raise TypeError(f"{function!r} is not callable")
        try:
            inspect.signature(target).bind(None, **(kwargs or {}))
        except TypeError as error:
            raise TypeError(f"{function!r} cannot be called with a sample and kwargs: {error}") from error
        except ValueError:  # one that does not tell its parameters
            pass
        awaited = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
        return _FORMS[awaited, group](target, kwargs or {})


class _Form:
    def __init__(self, function: Any, kwargs: dict[str, Any]) -> None:
        self.function = function
        self.kwargs = kwargs


class _AsyncFunction(_Form):
    async def judge(self, sample: JudgedSample) -> Any:
        return await self.function(sample, **self.kwargs)


class _SyncFunction(_Form):
    def judge(self, sample: JudgedSample) -> Any:
        return self.function(sample, **self.kwargs)


class _AsyncGroupFunction(_Form):
    async def judge_group(self, samples: list[JudgedSample]) -> Any:
        return await self.function(samples, **self.kwargs)


class _SyncGroupFunction(_Form):
    def judge_group(self, samples: list[JudgedSample]) -> Any:
        return self.function(samples, **self.kwargs)


_FORMS = {
    (True, False): _AsyncFunction,
    (False, False): _SyncFunction,
    (True, True): _AsyncGroupFunction,
    (False, True): _SyncGroupFunction,
}
