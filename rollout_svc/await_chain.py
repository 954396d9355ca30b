"""What a task waits for, read from outside: its coroutines, from the outermost to the innermost await.

Invariants:

- Reading changes nothing: nothing is awaited, resumed or kept.
- What cannot be looked into (made in C, or an object of somebody's own) is passed through or ends the chain; it is
  never an error.
- A chain is bounded, also where tasks wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

__all__ = ["MOST_TOLD", "await_chain", "links"]

MOST_TOLD: Final = 40
"""Most entries of a told chain: the middle of a longer one is left out."""
_OUTERMOST: Final = 10  # of those: what is kept of the outer end; the inner end says where it hangs
_MOST_LINKS: Final = 400  # followed in all
_TOLD_CHARS: Final = 200  # of one entry

Link = FrameType | asyncio.Future[Any]

_ATTRIBUTES: Final = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}
_KINDS: Final = (
    (Coroutine, _ATTRIBUTES[CoroutineType]),
    (AsyncGenerator, _ATTRIBUTES[AsyncGeneratorType]),
    (Generator, _ATTRIBUTES[GeneratorType]),
)
"""The same for look-alikes, as a compiler of Python to C makes them."""


def links(task: asyncio.Future[Any]) -> Iterator[Link]:
    """Yield the frames that a task is suspended in, outermost first, and the futures they wait for.

    A task that is waited for is yielded, then its own frames; of a gathering, the first that is not done.
    """
    link: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    for _ in range(_MOST_LINKS):
        if link is None:
            return
        names = _ATTRIBUTES.get(type(link))
        if names is not None:
            frame = getattr(link, names[0])
            if frame is not None:
                yield frame
            link = getattr(link, names[1])
        elif isinstance(link, asyncio.Future):
            yield link
            link = link.get_coro() if isinstance(link, asyncio.Task) else _unfinished_child(link)
        else:
            link, alike = _foreign(link)
            if alike is not None:
                yield alike


def _unfinished_child(future: asyncio.Future[Any]) -> asyncio.Future[Any] | None:
    children = getattr(future, "_children", ())  # of `asyncio.gather`, which keeps them for its own cancellation
    return next((child for child in children if isinstance(child, asyncio.Future) and not child.done()), None)


def _foreign(link: Any) -> tuple[Any, FrameType | None]:
    """What an object waits for that is none of Python's own, and its frame if it has one."""
    for kind, (frame, awaited) in _KINDS:
        if isinstance(link, kind) and hasattr(type(link), awaited):
            found = getattr(link, frame, None)
            return getattr(link, awaited), found if isinstance(found, FrameType) else None
    # The interpreter's own wrappers (a future's iterator, `__anext__`, `__await__` of a coroutine) show nothing of
    # what they hold, except to the collector.
    inside = (Coroutine, Generator, AsyncGenerator, asyncio.Future)
    return next((held for held in gc.get_referents(link) if isinstance(held, inside)), None), None


def await_chain(*tasks: asyncio.Future[Any] | None) -> list[str]:
    """Tell what tasks wait for, one after the other: `module.function:line` outermost first, `task NAME` between."""
    told: list[str] = []
    for number, task in enumerate(given for given in tasks if isinstance(given, asyncio.Task)):
        if number:
            told.append(_tell_task(task))
        for link in links(task):
            if isinstance(link, FrameType):
                told.append(_tell_frame(link))
            elif isinstance(link, asyncio.Task):
                told.append(_tell_task(link))
    if len(told) > MOST_TOLD:
        left_out = len(told) - MOST_TOLD + 1
        told[_OUTERMOST : _OUTERMOST + left_out] = [f"({left_out} more)"]
    return told


def _tell_task(task: asyncio.Task[Any]) -> str:
    return f"task {task.get_name()}"[:_TOLD_CHARS]


def _tell_frame(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"[:_TOLD_CHARS] + f":{frame.f_lineno}"
