"""The owner of tasks: every one named and known, deaths told once, and an end within its deadline."""

import asyncio

import pytest

from rollout_svc.tasks import TaskOwner, wait_until
from tests.support.virtual import soon, virtual

Death = tuple[str, str]


class Deaths(list[Death]):
    """A listener that keeps what it was told."""

    def __call__(self, name: str, error: BaseException, *_: bool) -> None:
        self.append((name, str(error)))


async def fail(message: str) -> None:
    raise RuntimeError(message)


async def end() -> None:
    return


async def forever() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    """Swallow every cancellation."""
    for _ in range(5):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            continue


@virtual
async def test_live_is_what_runs() -> None:
    """A task is live from its start to its end, under its name."""
    owner = TaskOwner()
    task = owner.spawn("wait:1", forever())
    assert owner.live == {task}
    assert task.get_name() == "wait:1"
    task.cancel()
    await wait_until([task], 1)
    assert not owner.live


@virtual
async def test_a_death_is_told_once_and_at_once() -> None:
    """An error nobody handles reaches the listener in the turn the task ended."""  # P23
    deaths = Deaths()
    owner = TaskOwner(deaths)
    owner.spawn("watch:1", fail("boom"))
    await soon(2)
    assert deaths == [("watch:1", "boom")]
    await soon()
    assert len(deaths) == 1


@virtual
async def test_the_end_of_a_task_is_told_however_it_ended() -> None:
    """`on_end` is called once for a task that returned, failed, or was cancelled before its first step."""
    deaths, ended = Deaths(), list[str]()
    owner = TaskOwner(deaths)
    for name, work in (("ends", end()), ("fails", fail("boom")), ("cancelled", forever())):
        task = owner.spawn(name, work, on_end=lambda name=name: ended.append(name))  # type: ignore[misc]
    task.cancel()
    await soon()
    assert sorted(ended) == ["cancelled", "ends", "fails"]
    assert deaths == [("fails", "boom")]
    assert not owner.live


@virtual
async def test_an_end_and_a_cancellation_are_no_deaths() -> None:
    """Nobody is told of a task that returned, was cancelled, or whose errors another handles."""
    deaths = Deaths()
    owner = TaskOwner(deaths)
    owner.spawn("ends", end())
    handled = owner.spawn("handled", fail("mine"), handled=True)
    cancelled = owner.spawn("cancelled", forever())
    critical = owner.spawn("critical", forever(), critical=True)
    await soon()
    cancelled.cancel()
    critical.cancel()
    await soon()
    assert deaths == []
    assert not owner.live
    assert str(handled.exception()) == "mine"


@virtual
async def test_a_critical_task_may_not_even_return() -> None:
    """A part that must live as long as the service is dead when it ends, however it ends."""  # P23
    deaths = Deaths()
    owner = TaskOwner(deaths)
    owner.spawn("producer", end(), critical=True)
    owner.spawn("watcher", fail("boom"), critical=True)
    await soon()
    assert deaths == [("producer", "producer ended although it must not"), ("watcher", "boom")]


@virtual
async def test_without_a_listener_errors_are_still_seen() -> None:
    """No "exception was never retrieved" where nobody listens: the owner has looked."""
    owner = TaskOwner()
    owner.spawn("fails", fail("boom"))
    owner.spawn("critical", fail("boom"), critical=True)
    await soon()
    assert not owner.live


@virtual
async def test_closing_names_those_who_stay() -> None:
    """One task that swallows its cancellation neither stops the others' end nor outlasts the deadline."""  # P12, P8
    owner = TaskOwner()
    swallower = owner.spawn("stubborn:1", stubborn())
    others = [owner.spawn(f"wait:{n}", forever()) for n in range(3)]
    await soon()
    loop = asyncio.get_running_loop()
    assert await owner.close(loop.time() + 2) == ("stubborn:1",)
    assert loop.time() == pytest.approx(2)
    assert all(task.cancelled() for task in others)
    await swallower


@virtual
async def test_closing_an_empty_owner_takes_no_time() -> None:
    """Closing is safe before anything was started, and twice."""
    owner = TaskOwner()
    assert await owner.close(100) == ()
    owner.spawn("wait", forever())
    assert await owner.close(100) == ()
    assert await owner.close(100) == ()
    assert asyncio.get_running_loop().time() == 0


@virtual
async def test_clean_up_is_cancelled_once() -> None:
    """A task that cleans up is waited for by a second close, not cancelled again."""  # P14
    owner = TaskOwner()
    cleaned = False

    async def cleans_up() -> None:
        nonlocal cleaned
        try:
            await forever()
        finally:
            await asyncio.sleep(5)
            cleaned = True

    owner.spawn("cleans", cleans_up())
    await soon()
    assert await owner.close(1) == ("cleans",)
    assert await owner.close(10) == ()
    assert cleaned


@virtual
async def test_what_cleans_up_is_cancelled_last() -> None:
    """P14: closing waits for clean-ups, those that begin meanwhile too, and for what somebody else cancelled before."""
    owner, done = TaskOwner(), list[str]()

    async def clean(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        done.append(name)

    async def sample() -> None:
        try:
            await forever()
        finally:
            await asyncio.shield(owner.spawn("second", clean("second", 6), cleans_up=True))

    async def cancelled_before() -> None:
        try:
            await forever()
        finally:
            await clean("third", 7)

    owner.spawn("first", clean("first", 5), cleans_up=True)
    owner.spawn("sample", sample())
    before = owner.spawn("before", cancelled_before())
    await soon()
    before.cancel()
    await soon()
    assert await owner.close(10) == ()
    assert done == ["first", "second", "third"]


@virtual
async def test_a_clean_up_that_takes_too_long_is_cancelled_in_the_end() -> None:
    """P8: in the last tenth it is cancelled like everything else, and only one that swallows that is named."""
    owner = TaskOwner()
    long = owner.spawn("long", forever(), cleans_up=True)
    owner.spawn("deaf", stubborn(), cleans_up=True)
    assert await owner.close(10) == ("deaf",)
    assert long.cancelled()
    assert asyncio.get_running_loop().time() == 10
    for _ in range(5):
        for task in owner.live:
            task.cancel()
        await soon()


@virtual
async def test_a_task_may_close_its_own_owner() -> None:
    """Whoever closes is not among those who are cancelled."""
    owner = TaskOwner()
    waiter = owner.spawn("wait", forever())

    async def closes() -> tuple[str, ...]:
        return await owner.close(10)

    assert await owner.spawn("closes", closes()) == ()
    assert waiter.cancelled()


@virtual
async def test_cancelling_a_close_propagates() -> None:
    """The caller of close can be cancelled too; what it cancelled stays cancelled."""  # P14
    owner = TaskOwner()
    swallower = owner.spawn("stubborn", stubborn())
    waiter = owner.spawn("wait", forever())
    await soon()
    closing = asyncio.create_task(owner.close(1000))
    await soon()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closing.cancelled()
    assert waiter.cancelled()
    await swallower


@virtual
async def test_waiting_cancels_nothing_and_raises_nothing() -> None:
    """`wait_until` ends at its deadline with whatever ended by then; errors stay with their tasks."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (fail("boom"), forever(), end())]
    await wait_until(tasks, 3)
    assert asyncio.get_running_loop().time() == pytest.approx(3)
    assert [task.done() for task in tasks] == [True, False, True]
    await wait_until(tasks, 3)
    tasks[1].cancel()
    await wait_until(tasks, 4)
    assert tasks[1].cancelled()
