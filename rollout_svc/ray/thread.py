"""A service in a thread with an event loop of its own.

Invariants:

- Made means: the configuration works, the port is bound, and the parts are there; engines may still be loading.
- What is asked of the service is asked in its loop.
- The service ends with `stop`, and never before: one that has failed says so at every call.
- `stop` is done when the service has stopped: what swallows its cancellation holds up the thread, and nobody else.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar, cast

import structlog

from rollout_svc.config import Config
from rollout_svc.errors import NotNow
from rollout_svc.hosting import calm_collector, hosted
from rollout_svc.loop import new_event_loop
from rollout_svc.service import STOP_MARGIN_S, RolloutService

__all__ = ["THREAD", "Host", "ServiceThread"]

T = TypeVar("T")
Host = Callable[[Config], AbstractAsyncContextManager[tuple[RolloutService, str]]]
"""Starts what runs in the thread, and serves it; gives it, and the url."""
THREAD: Final = "rollout-service"
"""Name of the thread."""
_START_S: Final = 120.0  # seconds to bind and to read the journal: a large one takes some
_log = structlog.get_logger("actor")


class ServiceThread:
    """Runs one service; see the module's invariants.

    Attributes:
        ready: done with the url once every configured engine has answered; raises what `RolloutService.ready` does.
        stop_s: seconds that `stop` may take.
        url: where the control API is served.
    """

    def __init__(self, config: Config, address: str | None = None, host: Host | None = None) -> None:
        """Start.

        Args:
            config: the settings.
            address: of this node, told where the service listens at all of them; None: what is bound.
            host: starts the service; None: `hosted` does.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        self.ready: Future[str] = Future()
        self.stop_s = config.pause.deadline_s + 2 * STOP_MARGIN_S
        self._host = host or (lambda config: hosted(config, "info", address=address))
        self._made: Future[tuple[RolloutService, str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        threading.Thread(target=self._serve, args=(config,), name=THREAD, daemon=True).start()
        self.service, self.url, self._loop, self._stop = self._made.result(_START_S)

    def run(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a call in the service's loop; cancelling the future cancels it.

        Raises:
            NotNow: the service has stopped.
        """
        if self._ended.done():
            call.close()
            raise NotNow("stopping", "the service has stopped")
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def calling(self, call: Callable[[RolloutService], T]) -> T:
        """Make a call that only looks; to be run in the service's loop. Over shards it has to be awaited."""
        answer = call(self.service)
        return cast("T", await answer) if inspect.isawaitable(answer) else answer

    def stop(self) -> Future[None]:
        """Drain and end; the future is done when the service has stopped. Idempotent."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        return self._ended

    def _serve(self, config: Config) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._live(config))
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits is told
            for waited in (self._made, self.ready, self._ended):
                if not waited.done():
                    waited.set_exception(error)

    async def _live(self, config: Config) -> None:
        stop = asyncio.Event()
        async with self._host(config) as (service, url):
            self._made.set_result((service, url, asyncio.get_running_loop(), stop))
            stopping = asyncio.ensure_future(stop.wait())
            ready = asyncio.ensure_future(service.ready())
            await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            self._tell(ready, url)
            await stopping
        self._ended.set_result(None)  # before the loop is closed, which waits for whatever does not end

    def _tell(self, ready: asyncio.Future[None], url: str) -> None:
        """Have those who wait for the engines know."""
        if not ready.done():
            ready.cancel()
            self.ready.set_exception(NotNow("stopping", "the service was stopped before its engines were there"))
        elif (error := ready.exception()) is not None:
            _log.error("service.not_ready", error=str(error))
            self.ready.set_exception(error)
        else:
            calm_collector()
            self.ready.set_result(url)
