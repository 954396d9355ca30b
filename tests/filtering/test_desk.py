"""A filter's desk: kept, dropped, or failed, and nothing in between; bounded, cancellable and off the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollout_svc.errors import SampleFailure
from rollout_svc.filtering import FILTER_FAILED, FilterDesk, GroupView, view_of
from rollout_svc.filtering.threads import AT_ONCE
from rollout_svc.ledger import Ledger
from rollout_svc.tasks import TaskOwner
from tests.support.bell import WAIT_S
from tests.support.filters import AsyncFilter, InlineFilter, SyncFilter
from tests.support.groups import completed
from tests.support.virtual import soon, virtual


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Court:
    """A desk, and who asks it."""

    def __init__(self, plugin: Any, timeout_s: float = 5.0) -> None:
        self.desk = FilterDesk(name="f", plugin=plugin, timeout_s=timeout_s)
        self.tasks = TaskOwner()
        self.left: list[asyncio.Task[Any]] = []

    def view(self, number: int = 0) -> GroupView:
        return view_of(completed(Ledger(), f"g{number}"))

    def let_go(self, task: asyncio.Task[Any]) -> None:
        self.left.append(task)
        task.cancel()

    async def ask(self, number: int = 0) -> str | None:
        return await self.desk.ask(self.view(number), self.tasks, self.let_go)

    async def failure(self) -> str:
        with pytest.raises(SampleFailure) as raised:
            await self.ask()
        assert raised.value.reason == FILTER_FAILED
        return raised.value.message


async def no_word() -> None:
    """Nothing."""


KINDS = (InlineFilter, SyncFilter, AsyncFilter)


@pytest.mark.parametrize("kind", KINDS)
async def test_none_keeps_and_a_reason_drops(kind: Callable[[], Any]) -> None:
    """What the filter said is what comes of it, whatever kind of filter it is."""
    court = Court(plugin := kind())
    assert await court.ask() is None
    plugin.verdict = lambda _: "dull"
    assert await court.ask() == "dull"
    assert not court.left


async def test_a_plain_function_is_a_filter() -> None:
    """A function of a group serves as well as an object with `keep`, an async one too."""
    assert await Court(lambda _: "dull").ask() == "dull"

    async def later(_: GroupView) -> str:
        return "later"

    assert await Court(later).ask() == "later"


@pytest.mark.parametrize("nothing", [3, GroupView, object()])
def test_what_cannot_be_called_is_refused(nothing: Any) -> None:
    """P35: something that has no `keep` and is no function is refused when the desk is made."""
    with pytest.raises(TypeError, match="keep"):
        FilterDesk(name="f", plugin=nothing, timeout_s=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rubbish", [True, False, 0, "", "  ", ["dull"], "long" * 100, "\ud83d", b"dull"])
async def test_an_answer_that_is_neither_decides_nothing(kind: Callable[[], Any], rubbish: Any) -> None:
    """P2: a group is neither kept nor dropped by something that is no reason and not None."""
    court = Court(plugin := kind())
    plugin.verdict = lambda _: rubbish
    assert "a reason of at most" in await court.failure()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "raised",
    [
        ValueError("no idea"),
        TimeoutError("its own"),
        SystemExit(3),
        KeyboardInterrupt(),
        Unspeakable(),
        asyncio.CancelledError(),
    ],
)
async def test_an_error_decides_nothing(kind: Callable[[], Any], raised: BaseException) -> None:
    """A filter that raises, exits, or cancels itself is a typed failure that names the error."""
    court = Court(plugin := kind())
    plugin.verdict = lambda _: raised
    message = await court.failure()
    assert message.startswith("f: ")
    assert type(raised).__name__ in message or "cancelled itself" in message or "exit(3)" in message
    assert "in 5 s" not in message


async def test_a_function_that_gives_a_coroutine_decides_nothing() -> None:
    """A synchronous filter that forgot to await is told so, and leaves no warning behind."""
    assert "coroutine" in await Court(lambda _: no_word()).failure()


@virtual
async def test_an_async_filter_is_ended_at_its_timeout() -> None:
    """One that never answers fails after `timeout_s`, its task is let go, and what it says later changes nothing."""
    court = Court(plugin := AsyncFilter(), timeout_s=7.0)
    plugin.hold = plugin.deaf = True
    started = asyncio.get_running_loop().time()
    assert "in 7 s" in await court.failure()
    assert asyncio.get_running_loop().time() - started == 7.0
    [task] = court.left
    await soon()
    assert not task.done()
    plugin.verdict = lambda _: ValueError("late")
    plugin.release()
    await soon()
    assert task.done()


@virtual
async def test_cancelling_ends_the_call_of_an_async_filter() -> None:
    """Who asks may be cancelled: it is cancelled, the filter's task is let go, and the view is closed."""  # P14
    court = Court(plugin := AsyncFilter())
    plugin.hold = True
    asking = asyncio.get_running_loop().create_task(court.ask())
    await soon()
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert [task.get_name() for task in court.left] == ["filter:g0"]
    await soon()
    assert plugin.cancelled == 1
    with pytest.raises(RuntimeError, match="decided on"):
        _ = plugin.views[0].ground_truth


async def test_a_sync_filter_runs_in_a_thread() -> None:
    """A filter that blocks holds up nobody: the loop goes on while it is asked."""
    court = Court(plugin := SyncFilter())
    plugin.hold = True
    asking = asyncio.get_running_loop().create_task(court.ask())
    await soon(20)
    assert not asking.done()
    plugin.release()
    assert await asking is None
    assert plugin.threads == ["filter:f"]
    await threads_ended()
    assert "running=0" in repr(court.desk)


async def test_a_sync_filter_that_hangs_fails_at_its_timeout() -> None:
    """Its thread cannot be ended, and what it says later goes nowhere."""
    court = Court(plugin := SyncFilter(), timeout_s=0.01)
    plugin.hold = True
    assert "in 0.01 s" in await court.failure()
    assert "running=1 overdue=1" in repr(court.desk)
    plugin.release()
    await threads_ended()
    assert "running=0 overdue=0" in repr(court.desk)


async def threads_ended() -> None:
    """Wait until no filter's thread is left, and the loop has heard of it."""
    for thread in threading.enumerate():
        if thread.name == "filter:f":
            await asyncio.to_thread(thread.join, WAIT_S)
    await soon()


async def test_threads_that_hang_are_bounded() -> None:
    """Where every thread is past its time, who comes is refused at once; when one returns there is a place again."""
    court = Court(plugin := SyncFilter(), timeout_s=0.01)
    plugin.hold = True
    before = threading.active_count()
    failures = await asyncio.gather(*(court.failure() for _ in range(3 * AT_ONCE)))
    assert sum("in 0.01 s" in said for said in failures) == AT_ONCE
    assert sum("have not returned" in said for said in failures) == 2 * AT_ONCE
    assert "have not returned" in await court.failure()
    assert threading.active_count() <= before + AT_ONCE
    plugin.release()
    await threads_ended()
    assert "running=0 overdue=0" in repr(court.desk)
    assert await court.ask() is None


async def test_waiting_for_a_thread_is_not_counted() -> None:
    """More calls than threads: each has its own time from when it begins, and none fails for waiting."""  # P21
    court = Court(plugin := SyncFilter(), timeout_s=WAIT_S)
    plugin.hold = True
    asking = [asyncio.get_running_loop().create_task(court.ask(n)) for n in range(3 * AT_ONCE)]
    for _ in range(AT_ONCE):
        assert await asyncio.to_thread(plugin.came.acquire, timeout=WAIT_S)
    asking[-1].cancel()  # one that waits
    asking[0].cancel()  # one that runs
    await soon()
    assert asking[0].cancelled()
    assert asking[-1].cancelled()
    plugin.release()
    assert await asyncio.gather(*asking[1:-1]) == [None] * (3 * AT_ONCE - 2)
    await threads_ended()
    assert "running=0" in repr(court.desk)
    assert len(plugin.seen) == 3 * AT_ONCE - 1
