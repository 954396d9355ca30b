"""Two shards that are one service to a trainer: over Ray, over HTTP, and while one of them is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import RolloutError
from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.cluster.configs import ON_HEAD, engine, lines, service
from tests.cluster.nodes import OTHERS, Nodes

_PROMPTS = 32


def weights(path: Path) -> dict[str, Any]:
    """Weights of the built-in model, as an update from disk names them."""
    from rollout_svc.embedded.model import build, preset, save_weights

    save_weights(build(preset("tiny"), seed=3), path)
    return {"kind": "disk", "path": str(path)}


def killed_shard(nodes: Nodes) -> int:
    """Kill the process of one shard; returns which."""
    from ray.util.state import list_actors

    alive = [a for a in list_actors(address=nodes.address, detail=True) if a.class_name == "ShardActor"]
    victim: Any = next(actor for actor in alive if actor.state == "ALIVE")
    pid = int(victim.pid)
    os.kill(pid, signal.SIGKILL)
    return pid


def taken(rollout: Any, step: int, groups: int) -> dict[str, Any]:
    """Take a batch, again and again while a shard that has a part of it is away."""
    import ray

    for _ in range(60):
        try:
            batch: dict[str, Any] = ray.get(
                rollout.take_batch.remote(step=step, groups=groups, timeout_s=5.0, ack=None), timeout=60
            )
        except RolloutError as error:
            last = error
        else:
            return batch
    raise last


def balanced(status: dict[str, Any]) -> dict[str, int]:
    """The groups of a ledger that sums."""
    groups: dict[str, int] = status["ledger"]["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    return groups


@pytest.mark.timeout(300)
def test_two_shards_are_one_service_and_lose_nothing(nodes: Nodes, tmp_path: Path) -> None:
    """P1, P31: batches, a pause, weights; one shard is killed: each prompt is taken once, and the ledger sums."""
    import ray

    import rollout_svc.ray

    config = service(
        *(engine(at=address) for address in OTHERS[:2]),
        buffer={"path": str(tmp_path / "journal")},
        producer={"shards": 2},
        trainer={"train_batch_size": 4, "prompt_repeat_k": 2, "over_sample_threshold": 0.5, "max_staleness": 50},
    )
    rollout = rollout_svc.ray.start(config, name="sharded", **ON_HEAD)
    try:
        assert ray.get(rollout.put_prompts.remote("t", lines(_PROMPTS)), timeout=30) == {"accepted": _PROMPTS}
        given: list[str] = []

        def take(step: int) -> None:
            batch = taken(rollout, step, 4)
            assert (batch["step"], len(batch["groups"])) == (step, 4)
            given.extend(group["prompt"]["id"] for group in batch["groups"])
            ray.get(rollout.ack.remote(batch["batch_id"]), timeout=60)

        take(0)
        url = ray.get(rollout.ready.remote(), timeout=30)
        with SyncRolloutClient(url) as client:
            assert {worker["id"] for worker in client.workers()} == {"s0.w0", "s1.w0"}
            report = client.pause(deadline_s=5.0)
            assert report["clean"]
            assert client.update_weights(1, weights(tmp_path / "one.safetensors"))["version"] == 1
            client.resume()
            batch = client.take_batch(step=1, groups=4, timeout_s=60.0)
            given.extend(group["prompt"]["id"] for group in batch["groups"])
            client.ack(batch["batch_id"])
        killed_shard(nodes)
        for step in range(2, _PROMPTS // 4):
            take(step)
        assert sorted(given) == sorted(f"p{number}" for number in range(_PROMPTS))
        status = ray.get(rollout.status.remote(), timeout=30)
        assert status["weight_version"] == 1
        assert balanced(status)["consumed"] == _PROMPTS
        assert [worker["weight_version"] for worker in status["workers"]] == [1, 1]
        assert ray.get(rollout.put_prompts.remote("t", lines(_PROMPTS)), timeout=30) == {"accepted": 0}
    finally:
        rollout_svc.ray.stop(rollout)
