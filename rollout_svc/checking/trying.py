"""One run of a plugin's coroutine, with something done to it at one of the points where it waits.

Invariant: it is over when this returns: what did not end by itself is cancelled, and that is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollout_svc.checking import places
from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.leftovers import Before, Left, left_since
from rollout_svc.checking.stepping import Stepped, ends_within

__all__ = ["ENDS_S", "Act", "ExitCalled", "Tried", "points", "tell", "try_it"]

ENDS_S: Final = 30.0
"""Seconds in which what was cancelled has to end."""
_MOST_POINTS: Final = 40

Act = Callable[[asyncio.Task[Any]], Awaitable[object] | None]
"""What is done to a run: at once, and what it gives to await, beside it."""


class ExitCalled(Exception):
    """Raised in place of an exit of the plugin's."""


@dataclass(slots=True)
class Tried:
    """What came of a run.

    Attributes:
        outcome: how it ended; `running`: it had not, and was cancelled, or left alone where it ignored that.
        value: what it returned.
        error: what it raised.
        waits: how often it waited.
        acted: whether what was to be done was done.
        where: the line that waited then, or that waits still.
        left: what runs on.
    """

    outcome: Literal["returned", "raised", "cancelled", "running"]
    value: Any
    error: BaseException | None
    waits: int
    acted: bool
    where: str
    left: list[Left]

    @property
    def told(self) -> str:
        """What it did, in words."""
        if self.outcome == "raised":
            return f"it raised {tell(self.error)}"
        words = {"returned": "it returned", "cancelled": "it was cancelled", "running": "it ran on"}
        return words[self.outcome]


def tell(error: BaseException | None) -> str:
    """An error in one line, also where its own text fails."""
    try:
        return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
    except Exception:  # noqa: BLE001 - an error of the plugin's making
        return type(error).__name__


async def try_it(
    work: Coroutine[Any, Any, Any],
    *,
    limit_s: float,
    at: int | None = None,
    act: Act | None = None,
    after: Callable[[], Awaitable[object]] | None = None,
) -> Tried:
    """Run a coroutine.

    Args:
        work: it.
        limit_s: seconds in which it has to end, after what was done to it.
        at: number of the wait at which something is done.
        act: does it; what it gives to await is awaited beside the run.
        after: is awaited when it has ended, whatever it did.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CheckLoop)  # noqa: S101 - whoever checks made it
    before = Before(loop)
    acted: list[str] = []
    beside: list[asyncio.Task[Any]] = []

    def waits(number: int) -> None:
        if number == at and act is not None:
            loop.call_soon(do)

    def do() -> None:
        if task.done() or act is None:
            return
        acted.append(stepped.where)
        more = act(task)
        if more is not None:
            beside.append(loop.create_task(_awaited(more), name="check"))

    stepped = Stepped(work, waits)

    async def run() -> Any:
        try:
            return await stepped
        except SystemExit as error:  # the loop would end for it
            raise ExitCalled(f"it called exit({error})") from error
        finally:
            if after is not None:
                await after()

    task = loop.create_task(run(), name="run")
    ended = await ends_within(task, limit_s)
    where = acted[0] if acted else ""
    if not ended:
        where = stepped.where
        task.cancel()
        await ends_within(task, ENDS_S)
    for other in beside:
        other.cancel()
    left = await left_since(before, loop, [task, *beside])
    return _outcome(task if ended else None, stepped.waits, acted=bool(acted), where=where, left=left)


def _outcome(task: asyncio.Task[Any] | None, waits: int, *, acted: bool, where: str, left: list[Left]) -> Tried:
    """Read what a run that ended came to; None: it did not."""
    if task is None:
        return Tried("running", None, None, waits, acted, where, left)
    if task.cancelled():
        return Tried("cancelled", None, None, waits, acted, where, left)
    error = task.exception()
    if error is not None:
        place = places.of_error(error.__cause__ if isinstance(error, ExitCalled) and error.__cause__ else error)
        return Tried("raised", None, error, waits, acted, place or where, left)
    return Tried("returned", task.result(), None, waits, acted, where, left)


async def _awaited(what: Awaitable[object]) -> None:
    await what


def points(waits: int) -> list[int]:
    """Numbers of the waits at which something is done: all, or some spread evenly."""
    if waits <= _MOST_POINTS:
        return list(range(1, waits + 1))
    return sorted({1 + round(k * (waits - 1) / (_MOST_POINTS - 1)) for k in range(_MOST_POINTS)})
