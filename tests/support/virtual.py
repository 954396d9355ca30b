"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is ready.

A test that would have to wait for seconds takes none; one that waits for nothing at all is told so.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

__all__ = ["VirtualLoop", "soon", "virtual"]

P = ParamSpec("P")
T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Never sleeps: what it was asked to wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: nothing is ready and nothing is scheduled")
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop on a clock of its own."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made, all of them virtual."""
        return self._jumping.now

    def pass_until(self, at: float) -> None:
        """Have it be so late, in the middle of a step, as it is where a step takes its time."""
        self._jumping.now = max(self._jumping.now, at)


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run an async test in virtual time; it stands below `@given`, so that every example has a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(test(*args, **kwargs))

    return run


async def soon(turns: int = 5) -> None:
    """Let everything that is ready run, without letting time pass."""
    for _ in range(turns):
        await asyncio.sleep(0)
