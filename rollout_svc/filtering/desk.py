"""What a filter is, and a call of one made bounded, cancellable and off the loop.

A filter is an object with `keep(group) -> str | None`, or a function like it: a reason to drop the group, or None. It
gets a `GroupView`. Async or not; a synchronous one is called in a thread, unless it says `inline = True`: then it only
compares what it is given, and is called in the loop.

Invariants:

- A group is kept where its filter said None, and dropped where it gave a reason. Whatever else comes of a call, an
  error, nothing in `timeout_s`, or an answer that is neither, is a SampleFailure `filter_failed`.
- A call ends for its caller once; a filter that goes on after that changes nothing, and its view is closed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final

from rollout_svc import blame
from rollout_svc.errors import SampleFailure
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.filtering.views import GroupView
from rollout_svc.tasks import TaskOwner

__all__ = ["FILTER_FAILED", "FilterDesk"]

FILTER_FAILED: Final = "filter_failed"
"""The reason of a group whose filter gave no answer."""
_REASON_CHARS: Final = 100  # of a reason: it is counted by, and stands in figures


class FilterDesk:
    """One task's filter."""

    __slots__ = ("_is_async", "_keep", "_threads", "inline", "name", "timeout_s")

    def __init__(self, *, name: str, plugin: Any, timeout_s: float) -> None:
        """Make the desk.

        Args:
            name: what it is called in messages.
            plugin: the filter.
            timeout_s: one call may take this long.

        Raises:
            TypeError: it can not be called as a filter.
        """
        keep = getattr(plugin, "keep", plugin)
        if not callable(keep) or inspect.isclass(keep):
            raise TypeError(f"{plugin!r} has no method keep(group)")
        self.name = name
        self.timeout_s = timeout_s
        self.inline = bool(getattr(plugin, "inline", False))
        self._keep: Callable[[GroupView], Any] = keep
        self._is_async = inspect.iscoroutinefunction(keep) or inspect.iscoroutinefunction(
            getattr(keep, "__call__", None)  # noqa: B004 - an object that is called, and async at that
        )
        self._threads = CallThreads(f"filter:{name}")

    def __repr__(self) -> str:
        return f"<FilterDesk {self.name} {self._threads!r}>"

    async def ask(self, view: GroupView, tasks: TaskOwner, let_go: Callable[[asyncio.Task[Any]], None]) -> str | None:
        """Return the reason to drop a group, or None to keep it; closes the view.

        Args:
            view: the group.
            tasks: who owns the task of an asynchronous filter.
            let_go: called with that task where it has to be ended, and may not end at once.

        Raises:
            SampleFailure: `filter_failed`.
        """
        try:
            if self._is_async:
                answer = await self._in_task(view, tasks, let_go)
            elif self.inline:
                answer = self._in_place(view)
            else:
                answer = await self._threads.call(lambda: self._kept(view), self.timeout_s)
            return self._checked(answer)
        except SampleFailure:
            raise
        except TimeoutError as error:
            raise self._failure(f"no word in {self.timeout_s:g} s") from error
        except NoThread as error:
            raise self._failure(str(error)) from error
        except Exception as error:
            raise self._failure(_told(error)) from error
        finally:
            view.close()

    def _in_place(self, view: GroupView) -> Any:
        try:
            return self._kept(view)
        except (TimeoutError, asyncio.CancelledError) as error:  # its own: neither our limit nor our cancellation
            raise self._failure(_told(error)) from error

    def _kept(self, view: GroupView) -> Any:
        with blame.contained():
            return self._keep(view)

    async def _in_task(self, view: GroupView, tasks: TaskOwner, let_go: Callable[[asyncio.Task[Any]], None]) -> Any:
        task = tasks.spawn(f"filter:{view.group_id}", _without_exit(self._keep, view), handled=True)
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                task.add_done_callback(_heard)
                let_go(task)
        if not task.done():
            raise self._failure(f"no word in {self.timeout_s:g} s")
        if task.cancelled():
            raise self._failure("it cancelled itself")
        error = task.exception()
        if error is not None:
            raise self._failure(_told(error)) from error
        return task.result()

    def _checked(self, answer: Any) -> str | None:
        if answer is None:
            return None
        if inspect.iscoroutine(answer):
            answer.close()
        if not isinstance(answer, str) or not answer.strip() or len(answer) > _REASON_CHARS or not _is_text(answer):
            said = f"a reason of at most {_REASON_CHARS} characters, or None"
            raise self._failure(f"expected {said}, got {answer!r:.200}")
        return str(answer)

    def _failure(self, message: str) -> SampleFailure:
        return SampleFailure(FILTER_FAILED, f"{self.name}: {message}")


def _is_text(reason: str) -> bool:
    """Whether it can be written down: half a character would break every figure it is counted in."""
    try:
        reason.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _without_exit(keep: Callable[[GroupView], Any], view: GroupView) -> Any:
    """Run a filter; the loop would end the whole service for one that exits."""
    with blame.contained():
        return await keep(view)


def _heard(task: asyncio.Task[Any]) -> None:
    """Look at how it ended, so that nobody is told that nobody did."""
    if not task.cancelled():
        task.exception()


def _told(error: BaseException) -> str:
    """Tell what a filter raised, also where the error's own text fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an object of the filter's making
        return type(error).__name__
