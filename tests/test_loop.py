"""The loop with bounded turns: it is a selector loop like any other, only never busy with data for long."""

import asyncio
import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from rollout_svc.loop import SLICE, BoundedLoop, in_bulk, new_event_loop

pytestmark = pytest.mark.skipif(not hasattr(selectors, "EpollSelector"), reason="there is no epoll here")
SIZE = 4


@pytest.fixture
def loop() -> Iterator[BoundedLoop]:
    """A loop of small slices."""
    made = BoundedLoop(SIZE)
    yield made
    made.close()


async def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


def test_it_is_the_loop_of_a_runner() -> None:
    """`asyncio.Runner` takes it; timers, threads and connections work as in any loop."""

    async def scenario() -> list[bytes]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BoundedLoop)
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        big = os.urandom(1 << 20)  # more than a socket takes at once: it has to be written in turns
        writer.write(big)
        writer.write_eof()
        async with asyncio.timeout(10):
            found = [await reader.read(), await asyncio.to_thread(lambda: b"thread")]
        writer.close()
        server.close()
        await server.wait_closed()
        assert found[0] == big
        return found

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(scenario())[1] == b"thread"


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    await writer.drain()
    writer.close()


def _turns(loop: BoundedLoop, read: dict[int, int], turns: int) -> None:
    """Look at what is ready that many times, counting each descriptor in `read`."""
    for _ in range(turns):
        for key, _events in loop.bulk.select(0):
            read[key.fd] = read.get(key.fd, 0) + 1


def test_data_is_handed_over_in_slices_and_nobody_starves(loop: BoundedLoop) -> None:
    """With thousands ready, a turn has a slice of them; each has had its turn before any has a second."""  # P16
    read: dict[int, int] = {}
    pairs = []

    async def scenario() -> None:
        for _ in range(5 * SIZE):
            ours, theirs = await _pair()
            pairs.append((in_bulk(ours), theirs))
            loop.add_reader(ours, lambda: None)
            theirs.send(b"x")
        assert len(loop.bulk.select(0)) == SIZE
        _turns(loop, read, 9)

    loop.run_until_complete(scenario())
    assert sorted(read) == sorted(ours.fileno() for ours, _ in pairs)
    assert set(read.values()) <= {1, 2}
    for ours, theirs in pairs:
        loop.remove_reader(ours)
        ours.close()
        theirs.close()


def test_control_is_handed_over_in_every_turn(loop: BoundedLoop) -> None:
    """A socket that is not in bulk is handed over at once, and first, however much data is ready."""  # P16

    async def scenario() -> list[socket.socket]:
        opened = []
        for number in range(5 * SIZE):
            ours, theirs = await _pair()
            opened += [ours, theirs]
            if number:
                in_bulk(ours)
            loop.add_reader(ours, lambda: None)
            theirs.send(b"x")
        for _ in range(3):
            ready = loop.bulk.select(0)
            assert len(ready) == SIZE + 1
            assert ready[0][0].fd == opened[0].fileno()
        return opened

    opened = loop.run_until_complete(scenario())
    for ours in opened[::2]:
        loop.remove_reader(ours)
    for sock in opened:
        sock.close()


def test_a_number_that_was_data_is_control_for_its_next_owner(loop: BoundedLoop) -> None:
    """The mark belongs to the socket: a descriptor that is given again begins unmarked."""

    async def scenario() -> None:
        ours, theirs = await _pair()
        number = in_bulk(ours).fileno()
        loop.add_reader(ours, lambda: None)
        assert loop.bulk._data == {number}
        loop.remove_reader(ours)
        ours.close()
        assert loop.bulk._data == set()
        theirs.close()
        again, other = await _pair()
        assert number in {again.fileno(), other.fileno()}
        for sock in (again, other):
            loop.add_reader(sock, lambda: None)
        assert loop.bulk._data == set()
        for sock in (again, other):
            loop.remove_reader(sock)
            sock.close()

    loop.run_until_complete(scenario())


def test_a_registration_is_found_changed_and_ended(loop: BoundedLoop) -> None:
    """What asyncio asks of a selector: keys by number or object, one per descriptor, changed in place."""
    ours, theirs = socket.socketpair()
    selector = loop.bulk
    key = selector.register(ours, selectors.EVENT_READ, "reader")
    with pytest.raises(KeyError):
        selector.register(ours.fileno(), selectors.EVENT_READ)
    assert selector.get_key(ours) is selector.get_key(ours.fileno()) is key
    assert ours.fileno() in selector.get_map()
    assert [found for found in selector.select(0) if found[0].fileobj is ours] == []
    changed = selector.modify(ours, selectors.EVENT_WRITE, "writer")
    assert (changed, selectors.EVENT_WRITE) in selector.select(0)
    ours.close()
    assert selector.unregister(ours) == changed
    with pytest.raises(KeyError):
        selector.unregister(ours)
    with pytest.raises(ValueError, match="invalid"):
        selector.register(-1, selectors.EVENT_READ)
    theirs.close()


async def test_in_another_loop_nothing_is_marked() -> None:
    """Whoever runs the service in a loop of their own gets what that loop does."""
    ours, theirs = await _pair()
    assert in_bulk(ours) is ours
    ours.close()
    theirs.close()
    assert SLICE > 0
