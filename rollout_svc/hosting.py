"""A service with everything around it that a process of its own has: log, figures, control API.

Invariants:

- Nothing is started before the configuration was found to work and the port was bound.
- Whatever ends the block, the service has been stopped when it is over.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from rollout_svc.config import Config, Portion
from rollout_svc.events import EventBus
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import Level
from rollout_svc.observe.metrics import Metrics
from rollout_svc.recovery import Restore
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService

__all__ = ["COLLECTOR", "calm_collector", "hosted"]

COLLECTOR: Final = (20_000, 2, 5_000)
"""Young objects before they are collected, some milliseconds of a turn; how many such collections before what survived
them is looked at again, in one turn as well: 100 of them held it for a second while 50,000 requests began; and how many
of those before everything is, which is 40 us for each request in flight."""
_log = structlog.get_logger("serve")


@asynccontextmanager
async def hosted(
    config: Config,
    level: Level,
    restore: Restore | None = None,
    before: Callable[[RolloutService], None] = lambda _: None,
    *,
    portion: Portion | None = None,
    address: str | None = None,
) -> AsyncIterator[tuple[RolloutService, str]]:
    """Start a service and serve its control API; gives both it and the url.

    Args:
        config: the settings.
        level: of the log.
        restore: see `RolloutService`.
        before: is called with the service before anything is bound or started.
        portion: see `RolloutService`.
        address: of this machine, for others; told where all of its addresses are listened at.

    Raises:
        ConfigError: it cannot be used; nothing was started.
    """
    bus = EventBus(on_error=lambda event, error: _log.error("subscriber.failed", event_type=type(event), error=error))
    service = RolloutService(config, bus=bus, restore=restore, portion=portion)
    log_events(bus, level)
    metrics = Metrics(bus, service.status)
    before(service)
    async with serve_http(service, metrics.render, address) as url:
        await service.start()
        if service.recovered:
            _log.info("journal.recovered", path=config.buffer.path, **service.recovered)
        _log.info("service.listening", url=url, workers=len(config.workers))
        try:
            yield service, url
        finally:
            await service.stop()
            _log.info("service.stopped", survivors=service.survivors)


def calm_collector() -> None:
    """Collect rarely: a sample is freed by its last reference, and collections were a third of its cost."""
    gc.freeze()  # what was imported lives as long as the process: no collection needs to look at it again
    gc.set_threshold(*COLLECTOR)
