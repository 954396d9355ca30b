"""A service that cannot be made now is made later, by itself, and says when; one that never can be is not."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError, InUse, NotNow, RolloutError
from rollout_svc.ray.making import CAP_S, Making, persist
from rollout_svc.ray.thread import ServiceThread
from rollout_svc.startup import StartFailed
from tests.cluster.configs import service
from tests.support.virtual import virtual

WAIT_S = 30.0
LOCKED = InUse.at("buffer.path", "journal.db.s1 is in use by another process")


@virtual
async def test_attempts_are_further_and_further_apart() -> None:
    """P20: capped, and it ends with the one that works; each failure was told with the time of the next attempt."""
    clock = asyncio.get_running_loop()
    tried: list[float] = []
    told: list[float] = []

    async def attempt() -> bool:
        tried.append(clock.time())
        if len(tried) < 9:
            raise LOCKED
        return True

    def failed(error: Exception, delay_s: float) -> float:
        assert error is LOCKED
        told.append(clock.time() + delay_s)
        return delay_s

    await persist(attempt, failed)
    gaps = [after - before for before, after in zip([0.0, *tried], tried, strict=False)]
    assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, CAP_S, CAP_S, CAP_S, CAP_S]
    assert told == tried[1:]


@virtual
async def test_what_can_never_work_is_given_up() -> None:
    """P35: when nothing may come of it nothing is tried any more."""
    tried = []

    async def attempt() -> bool:
        tried.append(asyncio.get_running_loop().time())
        raise ConfigError.at("tasks.0", "is wrong")

    await persist(attempt, lambda _error, _delay_s: None)
    assert tried == [1.0]


class Made:
    """What is made."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def failing(*errors: Exception, ends: Callable[[], Made]) -> Callable[[], Made]:
    """Fail with each of these, and make it then."""
    left: Iterator[Exception] = iter(errors)

    def make() -> Made:
        for error in left:
            raise error
        return ends()

    return make


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LOCKED, InUse),
        (StartFailed("the service was not there after 120 s"), StartFailed),
        (OSError("no space left"), NotNow),
    ],
)
def test_who_asks_is_told_when_it_is_tried_again(error: Exception, kind: type[RolloutError]) -> None:
    """P22: what is wrong and when it is tried again, in words and in seconds, also in another process."""
    made = threading.Event()

    def make() -> Made:
        made.set()
        return Made()

    making = Making(failing(error, ends=make))
    with pytest.raises(kind, match=r"; it is tried again in [01]\.\d s$") as told:
        making.get()
    assert str(error) in str(told.value)
    there = pickle.loads(pickle.dumps(told.value))  # noqa: S301 - our own
    assert there.again_in_s is not None
    assert 0.0 <= there.again_in_s <= 1.0
    assert made.wait(WAIT_S)


@pytest.mark.parametrize("error", [ConfigError.at("buffer.path", "is another's"), AttributeError("a bug")])
def test_what_is_wrong_for_good_is_said_for_ever(error: Exception) -> None:
    """P35: it is the same error at every call, with no word of another attempt, and there is none."""
    making = Making(failing(error, ends=Made))
    for _ in range(2):
        with pytest.raises(type(error)) as told:
            making.get()
        assert told.value is error
        assert getattr(told.value, "again_in_s", None) is None


def test_what_is_made_after_the_end_is_ended() -> None:
    """P14: nobody is left with a service that came up when its actor had been stopped already."""
    late, going, stopped = Made(), threading.Event(), threading.Event()

    def ends() -> Made:
        going.set()
        assert stopped.wait(WAIT_S)
        return late

    making = Making(failing(LOCKED, ends=ends))
    assert going.wait(WAIT_S)
    assert making.stop() is None
    stopped.set()
    assert late.stopped.wait(WAIT_S)
    assert making.made is None


def test_a_port_that_gets_free_is_taken() -> None:
    """A service whose port was another's is there once that has gone; nobody had to ask."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_from_mapping(service(cluster=None, service={"port": port}))
        came: Future[ServiceThread] = Future()

        def make() -> ServiceThread:
            thread = ServiceThread(config)
            came.set_result(thread)
            return thread

        making = Making(make)
        with pytest.raises(InUse, match=r"service\.port: cannot bind .*; it is tried again in"):
            making.get()
    thread = came.result(WAIT_S)
    try:
        assert thread.url == f"http://127.0.0.1:{port}"
    finally:
        making.stop()
        thread.stop().result(WAIT_S)
