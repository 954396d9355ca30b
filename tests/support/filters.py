"""Filters for tests: they say what the test says, when it says so, and remember what they were asked.

- A verdict is a reason, None, or an exception to raise; rubbish is passed on as it is.
- Nothing sleeps: a filter that is held answers when it is released.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rollout_svc.filtering import GroupView
from tests.support.bell import WAIT_S, Bell

__all__ = ["AsyncFilter", "InlineFilter", "SyncFilter"]


class _Filter:
    """What all of them have in common.

    Attributes:
        verdict: the rule.
        seen: group ids, in the order they were asked for.
        views: the views themselves, as a careless filter would keep them.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.verdict: Callable[[GroupView], Any] = lambda _: None
        self.seen: list[str] = []
        self.views: list[GroupView] = []

    def _look(self, group: GroupView) -> None:
        self.seen.append(group.group_id)
        self.views.append(group)

    def _answer(self, group: GroupView) -> Any:
        verdict = self.verdict(group)
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict


class InlineFilter(_Filter):
    """Called in the loop."""

    inline = True

    def keep(self, group: GroupView) -> Any:
        """Give the verdict."""
        self._look(group)
        return self._answer(group)


class SyncFilter(_Filter):
    """Called in a thread; `hold` makes calls wait there for `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self.came = threading.Semaphore(0)
        self.threads: list[str] = []
        self._go_on = threading.Event()

    def release(self) -> None:
        """Let those that wait answer, and hold no more."""
        self.hold = False
        self._go_on.set()

    def keep(self, group: GroupView) -> Any:
        """Give the verdict."""
        self._look(group)
        self.threads.append(threading.current_thread().name)
        self.came.release()
        if self.hold:
            self._go_on.wait(WAIT_S)
        return self._answer(group)


class AsyncFilter(_Filter):
    """Called in a task; `hold` makes calls wait for `release`, deaf ones whatever cancels them."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self.deaf = False
        self.cancelled = 0
        self._go_on = asyncio.Event()

    def release(self) -> None:
        """Let those that wait answer, and hold no more."""
        self.hold = False
        self._go_on.set()

    async def keep(self, group: GroupView) -> Any:
        """Give the verdict."""
        self._look(group)
        self.bell.ring()
        while self.hold:
            try:
                await self._go_on.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                self.bell.ring()
                if not self.deaf:
                    raise
        return self._answer(group)
