"""Weights from a trainer that blocks: the same promises, through the loop of its client."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from rollout_svc import Probe, SyncRolloutClient, SyncWeightPublisher
from rollout_svc.errors import NotNow
from rollout_svc.rpc.server import serve_http
from tests.embedded.helpers import served, small_model
from tests.rpc.api import api
from tests.support.fake_lmdeploy import FakeLMDeploy, Reply
from tests.support.stage import stage


def train(url: str) -> dict[str, Any]:
    """Two updates, one of them refused; what a trainer sees of it."""
    seen: dict[str, Any] = {}
    model = small_model(seed=1)
    with SyncRolloutClient(url) as client, SyncWeightPublisher(client, bucket_bytes=2**16) as publisher:
        probe = Probe.of(model, [1, 2, 3], every=True)
        seen["first"] = publisher.publish(model.state_dict(), 1, pause={"deadline_s": 5.0}, probe=probe)
        seen["allocated"] = publisher.allocated
        with pytest.raises(NotNow) as refused:
            publisher.publish({"norm.bias": torch.zeros(3)}, 2, pause={})
        seen["refused"] = str(refused.value.detail)
        client.resume()
        publisher.publish(iter(small_model(seed=2).state_dict().items()), 2, pause={})
        seen["again"] = publisher.allocated
        seen["took"] = publisher.transfer_s
        publisher.close()
    return seen


@pytest.mark.timeout(60)
async def test_a_trainer_without_a_loop_publishes() -> None:
    """P24: over HTTP, with a known answer; a refused update changes nothing, and no buffer is made twice."""
    async with (
        served(is_open=True) as engine,
        stage(str(engine.session._base_url)) as made,
        serve_http(made.service) as url,
    ):
        seen = await asyncio.to_thread(train, url)
        assert seen["first"] == {"version": 1, "workers": {"w0": {"ok": True, "version": 1, "probed": True}}}
        assert "norm.bias: float32 [3]" in seen["refused"]
        assert seen["again"] == seen["allocated"] > 0
        assert seen["took"] > 0
        wanted = small_model(seed=2).state_dict()
        found = dict(engine.scheduler.model.named_parameters())
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert made.service.status()["weight_version"] == 2


def test_one_that_was_never_used_has_nothing_to_close() -> None:
    """Neither a thread nor a socket; a way that there is not is refused where it is asked for."""
    before = threading.active_count()
    with SyncRolloutClient("http://127.0.0.1:9") as client:
        with SyncWeightPublisher(client) as publisher:
            assert publisher.allocated == 0
        with pytest.raises(ValueError, match="expected one of"):
            SyncWeightPublisher(client, way="pigeon")
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"logprobs": [-0.5]}, "source.probe.logprobs"),
        ({"logprobs": [-0.5, "much"]}, "source.probe.logprobs.1"),
        ({"prompt_ids": [1] * 1025}, "source.probe.prompt_ids"),
        ({"response_ids": []}, "source.probe.response_ids"),
        ({"tolerance": 0}, "source.probe.tolerance"),
        ({"guess": 1}, "source.probe.guess"),
    ],
)
async def test_a_probe_over_http(change: dict[str, Any], path: str) -> None:
    """P7 P35: one that cannot be right is 400 at its field and pauses nothing; a good one is asked."""
    probe = {"prompt_ids": [1], "response_ids": [7, 2], "logprobs": [-0.5, -0.25]}
    async with FakeLMDeploy() as engine, api(engine) as call:
        engine.answer = lambda _: Reply(tokens=[7, 2], logprobs=[-0.5, -0.25], finish="length")
        body: dict[str, Any] = {"version": 1, "source": {"kind": "external", "probe": {**probe, **change}}, "pause": {}}
        status, kind, detail = await call.refused("POST", "/v1/weights", body)
        assert (status, kind) == (400, "bad_request")
        assert path in [problem["path"] for problem in detail]
        assert call.stage.service.status()["ticket"] == 0
        body["source"]["probe"] = probe
        status, answer = await call("POST", "/v1/weights", body)
        assert (status, answer["workers"]["w0"]) == (200, {"ok": True, "version": 1, "probed": True})
