"""The door before the scheduler."""

import asyncio

import pytest

from rollout_svc.embedded.door import Door


async def settle() -> None:
    """Let every ready callback run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_newcomers_wait_in_order_while_paused() -> None:
    """Nobody enters a paused door; on resume all do, in the order they came."""
    door = Door()
    order: list[str] = []

    async def enter(rid: str) -> None:
        assert await door.enter(rid)
        order.append(rid)

    door.pause()
    tasks = [asyncio.create_task(enter(rid), name=rid) for rid in "abc"]
    await settle()
    assert (order, door.waiting, door.inside) == ([], 3, 0)
    door.resume()
    await asyncio.gather(*tasks)
    assert (order, door.waiting, door.inside) == (["a", "b", "c"], 0, 3)


async def test_a_pause_after_a_resume_still_holds() -> None:
    """A waiter woken by a resume that was taken back at once goes on waiting."""
    door = Door()
    door.pause()
    task = asyncio.create_task(door.enter("a"), name="a")
    await settle()
    door.resume()
    door.pause()
    await settle()
    assert not task.done()
    door.resume()
    assert await task


async def test_waiters_leave_by_being_turned_away_or_cancelled() -> None:
    """Neither counts as inside, and neither is let in later."""
    door = Door()
    door.pause()
    away, gone, stays = (asyncio.create_task(door.enter(rid), name=rid) for rid in ("away", "gone", "stays"))
    await settle()
    assert door.turn_away(lambda rid: rid == "away") == 1
    gone.cancel()
    assert await away is False
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert door.waiting == 1
    door.resume()
    assert await stays
    assert door.inside == 1


async def test_exclusive_use_waits_for_those_inside_and_holds_the_rest() -> None:
    """It begins when the last has left; two of them take turns; newcomers come after both."""
    door = Door()
    assert await door.enter("old")
    events: list[str] = []

    async def change(name: str) -> None:
        async with door.exclusively():
            events.append(f"{name} begins")
            await settle()
            events.append(f"{name} ends")

    async def newcomer() -> None:
        assert await door.enter("new")
        events.append("new enters")

    tasks = [asyncio.create_task(change(name), name=name) for name in ("one", "two")]
    await settle()
    tasks.append(asyncio.create_task(newcomer(), name="new"))
    await settle()
    assert events == []
    door.leave()
    await asyncio.gather(*tasks)
    assert events == ["one begins", "one ends", "two begins", "two ends", "new enters"]


async def test_a_cancelled_change_opens_the_door_again() -> None:
    """Newcomers are not held by a change that will not come."""
    door = Door()
    assert await door.enter("old")

    async def change() -> None:
        async with door.exclusively():
            pytest.fail("somebody was inside")

    task = asyncio.create_task(change(), name="change")
    await settle()
    late = asyncio.create_task(door.enter("late"), name="late")
    await settle()
    task.cancel()
    assert await late
    assert door.inside == 2


async def test_a_resume_during_a_change_waits_for_it() -> None:
    """The door stays closed until both the pause and the change are over."""
    door = Door()
    door.pause()
    async with door.exclusively():
        late = asyncio.create_task(door.enter("late"), name="late")
        door.resume()
        await settle()
        assert not late.done()
    assert await late
