"""A service in a thread with an event loop of its own.

Invariants:

- Made means: the configuration works, the port is bound, and the parts are there; engines may still be loading.
- What is asked of the service is asked in its loop.
- The thread ends with `stop`, and never before: a service that has failed says so at every call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from rollout_svc.config import Config, Portion
from rollout_svc.hosting import calm_collector, hosted
from rollout_svc.loop import new_event_loop
from rollout_svc.service import RolloutService

__all__ = ["ServiceThread"]

T = TypeVar("T")
_START_S: Final = 120.0  # seconds to bind and to read the journal: a large one takes some


class ServiceThread:
    """Runs one service; see the module's invariants.

    Attributes:
        ready: done with the url once every configured engine has answered; raises what `RolloutService.ready` does.
    """

    def __init__(self, config: Config, *, portion: Portion | None = None) -> None:
        """Start; raises ConfigError where the configuration cannot be used."""
        self._portion = portion
        self.ready: Future[str] = Future()
        self._made: Future[tuple[RolloutService, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        threading.Thread(target=self._serve, args=(config,), name="rollout-service", daemon=True).start()
        self.service, self._loop, self._stop = self._made.result(_START_S)

    def run(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a call in the service's loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def calling(self, call: Callable[[RolloutService], T]) -> T:
        """Make a call that does not wait; to be run in the service's loop."""
        return call(self.service)

    def stop(self) -> Future[None]:
        """Drain and end; the future is done when the service has stopped. Idempotent."""
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
        else:
            self._ended.set_result(None)

    async def _live(self, config: Config) -> None:
        stop = asyncio.Event()
        async with hosted(config, "info", portion=self._portion) as (service, url):
            self._made.set_result((service, asyncio.get_running_loop(), stop))
            try:
                await service.ready()
            except Exception as error:  # noqa: BLE001 - told to whoever waits for it, and by every call
                self.ready.set_exception(error)
            else:
                calm_collector()
                self.ready.set_result(url)
            await stop.wait()
