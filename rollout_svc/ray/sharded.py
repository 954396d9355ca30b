"""Shards in actors as one service with everything around it, and its batches on their way.

Invariants:

- What is wrong with the settings is found before any actor is made.
- Whatever ends the block, every shard has ended with its engines when it is over.
- A batch is read where its groups lie, when it is sent on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import structlog

from rollout_svc.assembly import prepare
from rollout_svc.config import Config
from rollout_svc.errors import ConfigError, Conflict, NotNow
from rollout_svc.events import EventBus
from rollout_svc.launching.cluster import cluster_problems
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import Level
from rollout_svc.observe.metrics import Metrics
from rollout_svc.ray.batch import Packed, Sender
from rollout_svc.ray.shard import ray_shards
from rollout_svc.rpc import bodies
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService
from rollout_svc.sharding.book import kept_book
from rollout_svc.sharding.coordinator import Coordinator
from rollout_svc.sharding.protocol import ShardLost

__all__ = ["coordinator_of", "hosted_shards", "pack_shards"]

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


async def pack_shards(coordinator: Coordinator, body: bodies.Batch, client: str | None, *, tensors: bool) -> Packed:
    """Lease a batch, and make what travels of it.

    Raises:
        Conflict: it is asked for as tensors.
        NotNow: a shard went with its part; the same step again gives it, once that has returned.
    """
    if tensors:
        raise Conflict("a batch of several shards is not to be had as tensors: take it as it is", type="sharded")
    batch = await coordinator.lease_batch(body.step, body.groups, body.timeout_s, body.ack)
    try:
        pieces = [piece async for piece in batch.encoded()]
    except ShardLost as lost:
        raise NotNow("not_enough", f"batch {batch.batch_id} is leased, and cannot be read now: {lost}") from lost
    left_s = batch.expires_at - asyncio.get_running_loop().time()
    sender = Sender(client, tuple(body.ack), batch.batch_id, batch.step, time.time() + left_s)
    return Packed(pieces, {}, sender, tensors=False)
