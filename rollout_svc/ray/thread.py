"""A service in a thread with an event loop of its own.

Invariants:

- Made means: the configuration works, the port is bound, and the parts are there; engines may still be loading.
- What is asked of the service is asked in its loop.
- The service ends with `stop`, and never before: one that has failed says so at every call.
- `stop` is done when the service has stopped: what swallows its cancellation holds up the thread, and nobody else.
- Every call ends: one that the service's end cuts off, or comes upon, says that it has stopped.
- A start that takes too long is given up: what comes up all the same is stopped again.
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
from rollout_svc.ray.lasting import stop_s
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartFailed

__all__ = ["THREAD", "Failure", "Host", "ServiceThread"]

T = TypeVar("T")
Host = Callable[[Config], AbstractAsyncContextManager[tuple[RolloutService, str]]]
"""Starts what runs in the thread, and serves it; gives it, and the url."""
THREAD: Final = "rollout-service"
"""Name of the thread."""
_START_S: Final = 120.0  # seconds to bind and to read the journal: a large one takes some
_log = structlog.get_logger("actor")


class Failure:
    """What a service could not be made for, to be raised at every call."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._at = None if error is None else error.__traceback__

    def again(self) -> Exception:
        """The error, and where it was first raised: those who raise it again are not added up."""
        return RuntimeError("the service was not made") if self._error is None else self._error.with_traceback(self._at)


class ServiceThread:
    """Runs one service; see the module's invariants.

    Attributes:
        ready: done with the url once every configured engine has answered; raises what `RolloutService.ready` does.
        stop_s: seconds that `stop` may take.
        url: where the control API is served.
    """

    def __init__(
        self, config: Config, address: str | None = None, host: Host | None = None, *, start_s: float = _START_S
    ) -> None:
        """Start.

        Args:
            config: the settings.
            address: of this node, told where the service listens at all of them; None: what is bound.
            host: starts the service; None: `hosted` does.
            start_s: seconds until it has to be made.

        Raises:
            ConfigError: the configuration cannot be used.
            StartFailed: it was not made in time.
        """
        self.ready: Future[str] = Future()
        self.stop_s = stop_s(config)
        self._host = host or (lambda config: hosted(config, "info", address=address))
        self._made: Future[tuple[RolloutService, str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        self._ending = threading.Lock()  # between a call that is handed to the loop and the end of that loop
        threading.Thread(target=self._serve, args=(config,), name=THREAD, daemon=True).start()
        try:
            made = self._made.result(start_s)
        except TimeoutError:
            if self._made.cancel():
                raise StartFailed(f"the service was not there after {start_s:g} s") from None
            made = self._made.result(start_s)  # it came just now; or the error was the service's own
        self.service, self.url, self._loop, self._stop = made

    def run(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a call in the service's loop; cancelling the future cancels it, and so does the end of the loop.

        Raises:
            NotNow: the service has stopped.
        """
        with self._ending:
            if self._ended.done():
                call.close()
                raise _stopped()
            return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call in the service's loop, from another; whoever is cancelled here cancels it there.

        Raises:
            NotNow: the service has stopped, now or meanwhile.
        """
        running = self.run(call)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise _stopped() from None  # it was ended there, not here

    async def calling(self, call: Callable[[RolloutService], T]) -> T:
        """Make a call that only looks; to be run in the service's loop. Over shards it has to be awaited."""
        answer = call(self.service)
        return cast("T", await answer) if inspect.isawaitable(answer) else answer

    def stop(self) -> Future[None]:
        """Drain and end; the future is done when the service has stopped. Idempotent."""
        with self._ending:
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
        try:
            await self._host_it(config)
        except BaseException as error:
            self._over(error)
            raise
        else:
            self._over()  # before the loop is closed, which waits for whatever does not end
        finally:
            await asyncio.sleep(0)  # what was handed to the loop before that has begun, and is cancelled with the rest

    async def _host_it(self, config: Config) -> None:
        stop = asyncio.Event()
        async with self._host(config) as (service, url):
            if not self._made.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            self._made.set_result((service, url, asyncio.get_running_loop(), stop))
            stopping = asyncio.ensure_future(stop.wait())
            ready = asyncio.ensure_future(service.ready())
            await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            self._tell(ready, url)
            await stopping

    def _over(self, error: BaseException | None = None) -> None:
        """From now on no call is handed to the loop."""
        with self._ending:
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

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


def _stopped() -> NotNow:
    return NotNow("stopping", "the service has stopped")
