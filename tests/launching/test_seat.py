"""A place for an engine on a cluster, once Ray cannot tell what became of it, or is not there any more."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.launching.cluster.holding import Door, Held
from rollout_svc.launching.cluster.host import Place
from rollout_svc.launching.cluster.seat import RaySeat
from rollout_svc.launching.launch import Launch, LaunchFailed
from tests.support.virtual import soon

WAIT_S = 10.0
LAUNCH = Launch(("engine",), {}, Path("engine.log"))
PLACE = Place("127.0.0.1", "ab", "python", "logs", (20_001,), "127.0.0.1:1")


class Answer:
    """What a call of an actor returns: its answer, or the error it fails with."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> Answer:
        """Make the call."""
        return self

    def future(self) -> Future[Any]:
        """What it comes to."""
        future: Future[Any] = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        else:
            future.set_result(self._answer)
        return future


class UncertainHost:
    """An engine's host that answers where it is, and is unavailable when it is to start something."""

    def __init__(self, door: Door) -> None:
        from ray.exceptions import ActorUnavailableError

        self.listen = Answer(door)
        self.where = Answer(PLACE)
        self.start = Answer(ActorUnavailableError("it may have heard", None))


async def dropped(seat: RaySeat, held: Held) -> None:
    """Give a seat up, and wait until its host has heard."""
    seat.drop()
    async with asyncio.timeout(WAIT_S):
        await held.left.wait()
    await soon()


async def _nothing() -> None:
    return


@pytest.mark.unconnected
async def test_a_host_that_may_have_started_something_is_not_asked_again() -> None:
    """It would say that its process has not ended, until all restarts are used up: another takes its place."""
    held = Held()
    seat = RaySeat(UncertainHost(await held.listen("127.0.0.1")), "", _nothing)
    assert await seat.look()
    with pytest.raises(LaunchFailed, match="it may have heard"):
        await seat.start(LAUNCH)
    assert not await seat.look()
    await dropped(seat, held)


@pytest.mark.unconnected
async def test_a_place_is_given_back_also_where_the_cluster_was_left() -> None:
    """What the process had there ended with the connection: the rest of what is to be ended still is."""
    given_back = asyncio.Event()

    async def give_back() -> None:
        given_back.set()

    seat = RaySeat(UncertainHost(Door("127.0.0.1", 9, b"")), "", give_back)
    await seat.close(asyncio.get_running_loop().time() + 5.0)
    assert given_back.is_set()


@pytest.mark.unconnected
async def test_a_host_is_let_go_of_when_its_seat_is_given_up() -> None:
    """P19: it hears so itself, whatever Ray tells it: its engine is not to run beside the next one."""
    held = Held()
    seat = RaySeat(UncertainHost(await held.listen("127.0.0.1")), "", _nothing)
    assert await seat.look()
    assert await seat.look()
    assert not held.left.is_set()
    await dropped(seat, held)
    assert not await seat.look()


async def test_a_host_that_the_service_cannot_reach_is_no_place() -> None:
    """Its engine could not be reached either: it says so before one is started."""
    seat = RaySeat(UncertainHost(Door("127.0.0.1", 9, b"")), "", _nothing)
    assert not await seat.look()
    assert "127.0.0.1:9 cannot be reached from the service" in seat.why
