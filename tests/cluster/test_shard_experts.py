"""Routed experts of two shards in actors: by reference, as tensors, lost with a shard, and nothing left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_svc.ray
from rollout_svc.errors import SpentHandle
from rollout_svc.packing.reading import experts_of
from rollout_svc.ray.thread import THREAD
from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.cluster.configs import ON_HEAD, lines, service
from tests.cluster.fakes import fake_engine
from tests.cluster.leftovers import until
from tests.cluster.nodes import Nodes
from tests.cluster.test_actor_batches import SAMPLE_BYTES, WIDE, experts, settles_at, stored
from tests.cluster.test_sharded import taken

GROUPS, GROUP_SIZE = 4, 2
SAMPLES = GROUPS * GROUP_SIZE
_LOST_S = 30.0
"""Seconds for Ray to have noticed that an owner has died."""


@contextmanager
def two_shards(name: str, store: str, nodes: Nodes, folder: Path, prompts: int = 2 * GROUPS) -> Iterator[Any]:
    """Start a service of two shards, each with a fake engine with experts, and give it prompts."""
    import ray

    with ExitStack() as stack:
        engines = [stack.enter_context(fake_engine(experts=WIDE)) for _ in range(2)]
        config = service(
            *({"url": engine.url} for engine in engines),
            experts=experts(store, nodes.address),
            buffer={"path": str(folder / "journal")},
            producer={"shards": 2},
            trainer={"train_batch_size": GROUPS, "prompt_repeat_k": GROUP_SIZE, "max_staleness": 20},
        )
        rollout = rollout_svc.ray.start(config, name=name, **ON_HEAD, num_cpus=0.1)
        try:
            ray.get(rollout.put_prompts.remote("t", lines(prompts)), timeout=30)
            yield rollout
        finally:
            rollout_svc.ray.stop(rollout)


def same(batch: Any, read: dict[str, Any]) -> None:
    """Every sample has its own."""
    samples = {sample["sample_id"]: sample for group in batch["groups"] for sample in group["samples"]}
    assert read.keys() == samples.keys()
    for name, rows in read.items():
        np.testing.assert_array_equal(rows, WIDE.rows(samples[name]["prompt_ids"] + samples[name]["response_ids"]))


def read(batch: Any) -> dict[str, Any]:
    """What its handles read."""
    return {name: handle.read() for name, handle in batch.take_experts().items()}


def handles_alive(rollout: Any) -> int:
    """Tensor handles of all shards, by their own account."""
    import ray

    tensors = ray.get(rollout.status.remote(), timeout=30)["tensors"]
    return sum(kind["handles"] for kind in tensors.values())


@pytest.mark.short
@pytest.mark.timeout(240)
@pytest.mark.parametrize("store", ["ray", "memory"])
def test_routed_experts_of_all_shards_are_read_where_they_lie(nodes: Nodes, tmp_path: Path, store: str) -> None:
    """P27: from the take to the ack and no longer, as of one service; no bytes of them pass through the coordinator."""
    import ray

    before = stored()
    with two_shards(f"lends-{store}", store, nodes, tmp_path) as rollout:
        batch = ray.get(rollout.take_batch.remote(step=0, groups=GROUPS, timeout_s=60), timeout=90)
        handles = batch.take_experts()
        assert len(handles) == SAMPLES
        assert {handle.nbytes for handle in handles.values()} == {SAMPLE_BYTES}
        same(batch, read(batch))
        assert ray.get(rollout.touched.remote(), timeout=30) == {}, "the coordinator passes references on"
        total = ray.remote(num_cpus=0.1)(_total)
        assert ray.get(total.remote(batch), timeout=60) == SAMPLES * SAMPLE_BYTES
        kept = next(iter(handles.values())).read()
        copy = kept.copy()
        after = ray.get(rollout.take_batch.remote(step=1, groups=GROUPS, timeout_s=60), timeout=90)
        for handle in handles.values():
            with pytest.raises(SpentHandle, match="after the ack of batch"):
                handle.read()
        with pytest.raises(SpentHandle, match="after the ack of batch"):
            batch.take_experts()
        np.testing.assert_array_equal(kept, copy)
        same(after, read(after))
        ray.get(rollout.ack.remote(after["batch_id"]), timeout=30)
        del kept
        assert handles_alive(rollout) == 0
        assert settles_at(before), "the batches that are still here keep nothing once they are acknowledged"
    assert settles_at(before)


def _total(batch: Any) -> int:
    return sum(handle.read().nbytes for handle in batch.take_experts().values())


@pytest.mark.timeout(240)
def test_a_batch_of_shards_is_had_as_tensors(nodes: Nodes, tmp_path: Path) -> None:
    """P27: over HTTP and over Ray one body, read by the coordinator beside its loop; all gone after the ack."""
    import ray

    before = stored()
    with two_shards("packs", "memory", nodes, tmp_path, prompts=GROUPS) as rollout:
        url = ray.get(rollout.ready.remote(), timeout=60)
        with SyncRolloutClient(url) as client:
            record = client.take_batch(0, GROUPS, timeout_s=6.0, ack=None)
            same(record, client.take_experts(record))
            packed = client.take_batch(0, GROUPS, timeout_s=6.0, ack=None, tensors=True)
            assert packed["batch_id"] == record["batch_id"]
            same(record, client.take_experts(packed))
            over_ray = ray.get(
                rollout.take_batch.remote(step=0, groups=GROUPS, timeout_s=6, ack=None, tensors=True), timeout=90
            )
            same(record, experts_of(over_ray))
            assert over_ray.take_experts() == {}
            through = ray.get(rollout.touched.remote(), timeout=30)
            assert sum(through.values()) >= 3 * SAMPLES * SAMPLE_BYTES
            assert through.get(THREAD, 0) == 0
            client.ack(record["batch_id"])
        assert handles_alive(rollout) == 0
        assert settles_at(before)
    assert settles_at(before)


@pytest.mark.timeout(240)
def test_a_shard_that_is_killed_takes_its_own_and_gives_them_anew(nodes: Nodes, tmp_path: Path) -> None:
    """P27, P31: the other shard's are read on; the same step again has all, from the journal; nothing is left."""
    import ray

    before = stored()
    with two_shards("loses", "ray", nodes, tmp_path, prompts=GROUPS) as rollout:
        batch: Any = taken(rollout, 0, GROUPS)
        handles = batch.take_experts()
        os.kill(_a_shard(), signal.SIGKILL)
        lost = _lost(handles)
        assert 0 < len(lost) < len(handles)
        again: Any = taken(rollout, 0, GROUPS)
        assert again["batch_id"] == batch["batch_id"]
        assert again["groups"] == batch["groups"]
        same(again, read(again))
        ray.get(rollout.ack.remote(again["batch_id"]), timeout=60)
        until(lambda: handles_alive(rollout) == 0, "the shard that returned has said so")
        del handles, batch, again
        assert settles_at(before)
    assert settles_at(before)


def _a_shard() -> int:
    """Process of one shard that is alive."""
    from ray.util.state import list_actors

    alive: list[Any] = [one for one in list_actors(detail=True, timeout=30) if one.state == "ALIVE"]
    return int(next(actor.pid for actor in alive if actor.class_name == "ShardActor"))


def _lost(handles: dict[str, Any]) -> list[str]:
    """Which of them cannot be read any more, once Ray has noticed; those say what to do."""
    deadline = time.monotonic() + _LOST_S
    lost: list[str] = []
    while not lost and time.monotonic() < deadline:
        time.sleep(0.2)
        lost = [name for name, handle in handles.items() if not _readable(handle)]
    return lost


def _readable(handle: Any) -> bool:
    try:
        return bool(handle.read().nbytes == SAMPLE_BYTES)
    except SpentHandle as error:
        if "take the same step again" not in str(error):
            raise
        return False
