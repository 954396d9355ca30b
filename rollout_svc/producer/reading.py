"""Reading ahead: what may block has a thread of its own, and the event loop never waits for it.

Invariants:

- Everything that may block, `next()` of somebody's iterator above all, happens in the reader's thread; the loop's side
  (`peek`, `advance`, `open`, `close`) returns at once.
- The thread is a daemon and nobody joins it: a reader that hangs for ever keeps no process from ending.
- Lines arrive in order, none is lost and none is shown twice; at most `AHEAD` are read and not used up.
- A position is that of what was used up, never of what was read: each line carries the state of its source after it.
- Whoever was shown nothing is woken once by what comes next: a line, the end, or the reader's error.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import orjson

from rollout_svc.buffer.storage import Position
from rollout_svc.producer.lines import PromptLine

__all__ = ["AHEAD", "ReadAhead", "Stated"]

Stated = tuple[PromptLine, bytes | None]
"""A line, and what its source says of its position after it: JSON, or None of a source that says nothing."""

AHEAD: Final = 128
"""Lines read and not used up, at most: more than a loop admits between two turns of the thread."""
_REFILL: Final = 64  # lines left at which the thread goes on, so that it wakes once per stretch and not per line


class ReadAhead:
    """Lines of an iterator, read by a thread of its own."""

    def __init__(self, name: str, lines: Iterator[Stated], first: int = 0) -> None:
        """Make a reader; it starts at `open`.

        Args:
            name: of the thread, for people.
            lines: what to read; used by one thread at a time.
            first: lines read here and now, for readers that are known not to block for long.
        """
        self._name = name
        self._source = lines
        self._lines: deque[Stated] = deque(islice(lines, first))
        self._used = 0
        self._state: bytes | None = None
        self.skips = 0
        self._ended = False
        self._error: BaseException | None = None
        self._hungry = True
        self._closed = False
        self._room = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} ahead={len(self._lines)} ended={self._ended}>"

    # -- the loop's side -------------------------------------------------------------------------------------

    def open(self, wake: Callable[[], None]) -> None:
        """Begin to read; `wake()` is called in this loop when a line came for whoever was shown none."""
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Read no more; idempotent, safe before `open`. A thread inside `next()` ends when that returns, if ever."""
        self._closed = True
        self._room.set()

    def begin_at(self, position: Position, lines: Iterator[Stated], *, skips: int = 0) -> None:
        """Read these lines instead, which are what is left after `position`; before `open`.

        Args:
            position: where it stands now.
            lines: what to read.
            skips: lines that `lines` reads again and drops, for people to know.
        """
        self._source, self._lines = lines, deque()
        self._used, self.skips = position.used, skips
        self._state = None if position.state is None else orjson.dumps(position.state)

    @property
    def epoch(self) -> int | None:
        """Passes that were begun, where lines come in passes."""
        return None

    def as_json(self) -> dict[str, Any]:
        """What status says of it."""
        return {"used": self._used, "epoch": self.epoch, "exhausted": self.exhausted, "known_ids": None}

    @property
    def exhausted(self) -> bool:
        """No line will ever come again."""
        return self._ended and self._error is None and not self._lines

    def peek(self) -> PromptLine | None:
        """The next line, or None when there is none now.

        Raises:
            Exception: what the iterator raised, once all lines before it are used up.
        """
        self._hungry = not self._lines  # before looking again: a line that comes in between is seen or told
        if self._lines:
            self._hungry = False
            return self._lines[0][0]
        if self._error is not None:
            raise self._error
        return None

    @property
    def position(self) -> Position:
        """Where it stands."""
        return Position(self._used, None if self._state is None else orjson.loads(self._state))

    def advance(self) -> Position:
        """Use up the line that `peek` showed; returns where it stands now."""
        _, self._state = self._lines.popleft()
        self._used += 1
        if len(self._lines) <= _REFILL:
            self._room.set()
        return self.position

    # -- the thread's side -----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            for line in self._source:
                if self._closed:
                    return
                self._lines.append(line)
                self._tell()
                if len(self._lines) >= AHEAD:
                    self._await_room()
        except Exception as error:  # noqa: BLE001 - raised again where the lines are used
            self._error = error
        except BaseException as error:  # noqa: BLE001 - an iterator that exits ends neither a thread nor the service
            self._error = RuntimeError(f"{self._name} raised {type(error).__name__}: {error}")
            self._error.__cause__ = error
        finally:
            self._ended = not self._closed
            self._hungry = True  # the end is news to everybody
            self._tell()

    def _await_room(self) -> None:
        while True:
            self._room.clear()
            if self._closed or len(self._lines) <= _REFILL:
                return
            self._room.wait()

    def _tell(self) -> None:
        if self._hungry and self._loop is not None and not self._closed:
            self._hungry = False
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._wake)
