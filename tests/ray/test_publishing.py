"""Weights published by an actor: a trainer's rank that has them, in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rollout_svc import SyncRolloutClient, SyncWeightPublisher
from rollout_svc.rpc.server import serve_http
from tests.embedded.helpers import served, small_model
from tests.support.stage import stage

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Rank:
    """A trainer's rank."""

    def publish(self, url: str, seed: int, version: int) -> dict[str, Any]:
        """Have the engines take the weights of a seed; says what the service answered."""
        with SyncRolloutClient(url) as client, SyncWeightPublisher(client, bucket_bytes=2**16) as publisher:
            return dict(publisher.publish(small_model(seed=seed).state_dict(), version, pause={}))


@pytest.mark.timeout(120)
async def test_an_actor_publishes_its_weights() -> None:
    """P24: all it needs is the service's address: the engine has them bit for bit, and they are labelled."""
    import ray

    actor: Any = ray.remote(num_cpus=1)(Rank).remote()
    try:
        async with (
            served(is_open=True) as engine,
            stage(str(engine.session._base_url)) as made,
            serve_http(made.service) as url,
        ):
            answer = await asyncio.to_thread(lambda: ray.get(actor.publish.remote(url, 5, 1), timeout=90))
            assert answer == {"version": 1, "workers": {"w0": {"ok": True, "version": 1}}}
            found = dict(engine.scheduler.model.named_parameters())
            assert all(torch.equal(found[name], tensor) for name, tensor in small_model(seed=5).state_dict().items())
            assert made.service.state == "running"
    finally:
        ray.kill(actor)
