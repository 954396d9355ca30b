"""Holding on to an actor by a connection, over loopback."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rollout_svc.launching.cluster.holding import Held, hold, hold_here
from tests.support.virtual import soon

HERE = "127.0.0.1"
WAIT_S = 10.0


async def left(held: Held) -> None:
    """Wait until nobody holds on, and the connection is closed on both sides."""
    async with asyncio.timeout(WAIT_S):
        await held.left.wait()
    await soon()


async def test_who_lets_go_is_noticed_and_who_was_never_known_is_not() -> None:
    """Only the token makes a holder; a stranger that leaves has ended nothing."""
    met = asyncio.Event()
    held = Held(met.set)
    door = await held.listen(HERE)
    assert await held.listen(HERE) == door, "it stays where it is"
    with pytest.raises(ConnectionError, match="let go at once"):
        await hold(door._replace(token=b"-" * len(door.token)), WAIT_S)
    assert not met.is_set()
    grip = await hold(door, WAIT_S)
    assert met.is_set()
    assert not held.left.is_set()
    assert not grip.over
    with pytest.raises(OSError, match="Connect call failed"):
        await hold(door, WAIT_S)  # there is one, and nobody is let in any more
    grip.let_go()
    await left(held)
    assert grip.over


async def test_a_thread_without_a_loop_holds_on_as_well() -> None:
    """By its socket, which the system closes with the process."""
    held = Held()
    door = await held.listen(HERE)
    line = await asyncio.to_thread(hold_here, door, WAIT_S)
    assert not held.left.is_set()
    line.close()
    await left(held)


async def test_a_port_that_is_taken_is_passed_over() -> None:
    """The first that is free is where it listens."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        held = Held()
        door = await held.listen(HERE, (port, 0))
        held.close()
        assert door.port != port
        with pytest.raises(OSError, match="in use"):
            await Held().listen(HERE, (port,))
    assert repr(door) == f"<Door {HERE}:{door.port}>", "its token is nobody's to read"
