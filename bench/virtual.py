"""Virtual time for benches whose question is what a schedule does, not what a machine does.

Invariants:

- The clock stands while anything is ready and jumps to the next timer when nothing is: no wait costs anything.
- Equal programs have equal histories: tasks and futures hash by the order they were made in, so that no set of them is
  in the order of their addresses.
- No sockets, threads or executors: what asks for one is refused, since it would have a clock of its own.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from contextvars import Context
from typing import Any, NoReturn, TypeVar

__all__ = ["VirtualLoop", "run"]

T = TypeVar("T")


class _Task(asyncio.Task[Any]):
    """A task with a number."""

    def __init__(self, coroutine: Any, *, number: int, loop: Any, context: Context | None) -> None:
        self.number = number  # first: asyncio enters the task into a set as soon as it is made
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(asyncio.Future[Any]):
    """A future with a number."""

    number = 0

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Jumping(selectors.BaseSelector):
    """Has nothing to select from: what it is asked to wait is added to the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Keep what a loop registers of its own, and never report it ready."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget it."""
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let that much time pass.

        Raises:
            RuntimeError: nothing is ready and nothing is scheduled: whoever waits would do so for ever.
        """
        if timeout is None:
            raise RuntimeError(f"nothing is ready and nothing is scheduled at t = {self.now:g} s")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What was registered."""
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on a clock of its own, in seconds since it was made."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self._made = 0
        super().__init__(self._jumping)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now

    def create_future(self) -> _Future:
        """Make a numbered future."""
        future = _Future(loop=self)
        self._made += 1
        future.number = self._made
        return future

    def _make_task(self, loop: Any, coroutine: Coroutine[Any, Any, Any], context: Context | None = None) -> _Task:
        self._made += 1
        return _Task(coroutine, number=self._made, loop=loop, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]  # noqa: ARG002
        """Refuse: an executor has a clock of its own."""
        raise RuntimeError(f"an executor was asked for in virtual time: {func!r}")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, and close that."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
