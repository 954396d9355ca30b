"""Shards in actors as one service with everything around it, and its batches on their way.

Invariants:

- What is wrong with the settings is found before any actor is made.
- Whatever ends the block, every shard has ended with its engines when it is over.
- A batch is read where its groups lie, when it is sent on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import structlog

from rollout_svc.assembly import prepare
from rollout_svc.config import Config
from rollout_svc.errors import ConfigError
from rollout_svc.events import EventBus
from rollout_svc.launching.cluster import cluster_problems
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import Level
from rollout_svc.observe.metrics import Metrics
from rollout_svc.packing.parts import unreadable
from rollout_svc.ray.batch import Contents
from rollout_svc.ray.shard import ray_shards
from rollout_svc.rpc import bodies
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService
from rollout_svc.sharding.book import kept_book
from rollout_svc.sharding.coordinator import Coordinator
from rollout_svc.sharding.protocol import ShardLost

__all__ = ["coordinator_of", "hosted_shards", "take_shards"]

_log = structlog.get_logger("serve")


@asynccontextmanager
async def hosted_shards(
    config: Config,
    level: Level,
    before: Callable[[RolloutService], None] = lambda _: None,
    *,
    address: str | None = None,
) -> AsyncIterator[tuple[RolloutService, str]]:
    """Start the shards and who coordinates them, and serve its control API; gives both it and the url.

    Args:
        config: the settings, with `producer.shards`.
        level: of the log.
        before: see `hosted`.
        address: see `hosted`.

    Raises:
        ConfigError: it cannot be used, or no cluster answers; nothing was started.
    """
    prepare(config)
    if problems := await cluster_problems(config):
        raise ConfigError(problems)
    bus = EventBus(on_error=lambda event, error: _log.error("subscriber.failed", event_type=type(event), error=error))
    log_events(bus, level)
    async with kept_book(config) as book, ray_shards(config) as shards:
        coordinator = Coordinator(config, shards, bus=bus, book=book)
        # It has the calls of a service; those that only look have to be awaited, and whoever makes them does.
        service = cast("RolloutService", coordinator)
        before(service)
        metrics = Metrics(bus, coordinator.known_status)
        async with serve_http(service, metrics.render, address) as url:
            await coordinator.start()
            _log.info("service.listening", url=url, workers=len(config.workers), shards=len(shards))
            try:
                yield service, url
            finally:
                await coordinator.stop()
                _log.info("service.stopped", survivors=coordinator.survivors)


def coordinator_of(service: object) -> Coordinator | None:
    """Who is asked in place of a service; None: the service itself."""
    return service if isinstance(service, Coordinator) else None


async def take_shards(coordinator: Coordinator, body: bodies.Batch, *, tensors: bool) -> Contents:
    """Lease a batch, and take what is needed of it; its routed experts stay in Ray's store.

    Raises:
        Conflict: it is not lent any more.
        NotNow: a shard went with its part; the same step again gives it, once that has returned.
    """
    batch = await coordinator.lease_batch(body.step, body.groups, body.timeout_s, body.ack)
    left_s = batch.expires_at - asyncio.get_running_loop().time()
    taken = Contents(batch.batch_id, batch.step, left_s, in_shards=True)
    try:
        if tensors:
            return taken._replace(tensors=await batch.to_pack())
        record = [piece async for piece in batch.encoded()]
        experts = {sample_id: heavy.later() for sample_id, heavy in (await batch.experts()).items()}
    except ShardLost as lost:
        raise unreadable(batch.batch_id, lost) from lost
    return taken._replace(record=record, experts=experts)
