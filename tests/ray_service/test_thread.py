"""A service in a thread: what is asked of it in each state, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError, NotNow
from rollout_svc.hosting import hosted
from rollout_svc.ray.thread import ServiceThread
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartFailed
from tests.cluster.configs import service
from tests.cluster.fakes import fake_engine

WAIT_S = 30.0


def started(*workers: dict[str, Any], **sections: Any) -> ServiceThread:
    """Start a service on this machine."""
    return ServiceThread(config_from_mapping(service(*workers, cluster=None, **sections)), "192.0.2.7")


def test_a_service_ends_once_for_all_who_stop_it() -> None:
    """P14: every stop is done when it has stopped, and whoever calls then is told; nothing waits for ever."""
    with fake_engine() as engine:
        made = started({"url": engine.url})
        assert made.ready.result(WAIT_S) == made.url
        assert made.run(made.calling(lambda one: one.state)).result(WAIT_S) == "running"
        first, second = made.stop(), made.stop()
        assert first.result(WAIT_S) is second.result(WAIT_S) is None
        assert made.stop().result(0) is None
        with pytest.raises(NotNow) as told:
            made.run(made.calling(lambda one: one.state))
        assert told.value.type == "stopping"


def test_a_stop_does_not_wait_for_engines() -> None:
    """P8: a service whose engines never come is stopped at once, and who waits for them is told."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = started({"url": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        made.stop().result(WAIT_S)
        with pytest.raises(NotNow, match="before its engines were there"):
            made.ready.result(0)


def test_a_service_that_cannot_be_made_says_why() -> None:
    """P35: whatever is wrong is the error of whoever makes it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as told:
        started(service={"port": taken.getsockname()[1]})
    assert [problem.path for problem in told.value.problems] == ["service.port"]


def test_a_service_that_failed_says_so_and_can_be_stopped() -> None:
    """P23: with a dead component it stays, every wait on it fails with the traceback, and `stop` still ends it."""
    with fake_engine() as engine:
        made = started({"url": engine.url})
        made.ready.result(WAIT_S)
        waiting = made.run(made.service.take_batch(0, 4, WAIT_S))
        made.run(made.calling(_end_producer)).result(WAIT_S)
        with pytest.raises(NotNow, match="producer died") as told:
            waiting.result(WAIT_S)
        assert told.value.type == "failed"
        assert made.run(made.calling(lambda one: one.state)).result(WAIT_S) == "failed"
        made.stop().result(WAIT_S)


def _end_producer(service: RolloutService) -> None:
    service._died("producer", RuntimeError("it fell"), True)


def test_a_service_that_listens_everywhere_says_where_it_is() -> None:
    """The url is one that another machine can use."""
    made = started(service={"port": 0, "host": "0.0.0.0", "token": "secret"})
    try:
        assert made.url.startswith("http://192.0.2.7:")
    finally:
        made.stop().result(WAIT_S)


def test_a_call_ends_with_the_service() -> None:
    """P14: one that is cut off by the end of the loop is told that the service has stopped, as one that comes late."""
    with fake_engine() as engine:
        made = started({"url": engine.url})
        made.ready.result(WAIT_S)

        async def cut_off() -> None:
            begun = asyncio.Event()
            asking = asyncio.ensure_future(made.ask(_for_ever(asyncio.get_running_loop(), begun)))
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
                await asyncio.wrap_future(made.stop())
                await asking

        with pytest.raises(NotNow) as told:
            asyncio.run(cut_off())
        assert told.value.type == "stopping"


async def _for_ever(caller: asyncio.AbstractEventLoop, begun: asyncio.Event) -> None:
    caller.call_soon_threadsafe(begun.set)
    await asyncio.Event().wait()


def test_a_start_that_is_given_up_leaves_no_service() -> None:
    """What comes up after nobody waits for it any more is stopped at once, with what it began."""
    late, over = threading.Event(), threading.Event()

    @asynccontextmanager
    async def slow(config: Config) -> AsyncIterator[tuple[RolloutService, str]]:
        await asyncio.to_thread(late.wait, WAIT_S)
        async with hosted(config, "info") as hosts:
            yield hosts
        over.set()

    settings = config_from_mapping(service(cluster=None))
    with pytest.raises(StartFailed, match=r"not there after 0\.05 s"):
        ServiceThread(settings, host=slow, start_s=0.05)
    late.set()
    assert over.wait(WAIT_S)
