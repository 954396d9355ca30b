"""A service on Ray whose process dies: with a journal it goes on, without one its end is told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import NotFound, SpentHandle
from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.cluster.configs import ON_HEAD, engine, lines, service
from tests.cluster.fakes import fake_engine
from tests.cluster.nodes import OTHERS, Nodes
from tests.cluster.test_actor_batches import WIDE, experts, settles_at, stored

_AGAIN_S = 60.0
"""Seconds for a service to be there again, its engines included."""
_LOST_S = 20.0
"""Seconds for Ray to say that an object went with its owner: two."""


def pid_of(name: str) -> int:
    """The process of an actor."""
    import ray
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address
    [actor] = list_actors(address=address, filters=[("name", "=", name), ("state", "=", "ALIVE")], timeout=30)
    assert actor.pid
    return int(actor.pid)


def once_there(call: Any) -> Any:
    """Make a call until it is answered."""
    import ray

    deadline = time.monotonic() + _AGAIN_S
    while True:
        try:
            return ray.get(call(), timeout=_AGAIN_S)
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.timeout(300)
def test_a_service_that_was_killed_goes_on_from_its_journal(nodes: Nodes, tmp_path: Path) -> None:
    """P31: Ray starts it again; leases and prompts are there, its engines and its HTTP too; the handle is the same."""
    import ray

    import rollout_svc.ray

    assert nodes.address
    trainer = {"train_batch_size": 4, "prompt_repeat_k": 2, "over_sample_threshold": 0.0, "max_staleness": 4}
    config = service(engine(at=OTHERS[0]), buffer={"path": str(tmp_path / "journal")}, trainer=trainer)
    rollout = rollout_svc.ray.start(config, name="falls", **ON_HEAD, num_cpus=0.1)
    try:
        ray.get(rollout.put_prompts.remote("t", lines(8)), timeout=30)
        first = ray.get(rollout.take_batch.remote(step=0, groups=4, timeout_s=30), timeout=60)
        lent = ray.get(rollout.take_batch.remote(step=1, groups=4, timeout_s=30), timeout=60)
        waiting = rollout.take_batch.remote(step=2, groups=4, timeout_s=120, ack=None)
        os.kill(pid_of("falls"), signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(ray.exceptions.ActorUnavailableError):
            ray.get(waiting, timeout=_AGAIN_S)
        told_s = time.monotonic() - died
        again = rollout_svc.ray.connect("falls")
        there_s = time.monotonic() - died
        same = once_there(lambda: rollout.take_batch.remote(step=1, groups=4, timeout_s=30))
        assert (same["batch_id"], same["groups"]) == (lent["batch_id"], lent["groups"])
        url = ray.get(again.ready.remote(), timeout=_AGAIN_S)
        ready_s = time.monotonic() - died
        assert told_s <= there_s <= ready_s < _AGAIN_S
        with SyncRolloutClient(url) as client:
            assert client.status()["state"] == "running"
        ray.get(rollout.put_prompts.remote("t", lines(4, first=8)), timeout=30)
        last = ray.get(rollout.take_batch.remote(step=2, groups=4, timeout_s=30), timeout=60)
        taken = [group["group_id"] for batch in (first, lent, last) for group in batch["groups"]]
        assert len(set(taken)) == 12
        ledger = ray.get(rollout.status.remote(), timeout=30)["ledger"]["groups"]
        assert (ledger["consumed"], ledger["leased"]) == (8, 4)
    finally:
        rollout_svc.ray.stop(rollout)


@pytest.mark.timeout(240)
def test_without_a_journal_the_end_is_told(nodes: Nodes) -> None:
    """P23: a service that would have forgotten everything is not begun anew under its name; tensors say so too."""
    import ray

    import rollout_svc.ray

    before = stored()
    with fake_engine(experts=WIDE) as fake:
        config = service({"url": fake.url}, experts=experts("ray", nodes.address))
        rollout = rollout_svc.ray.start(config, name="forgets", **ON_HEAD, num_cpus=0.1)
        try:
            ray.get(rollout.put_prompts.remote("t", lines(4)), timeout=30)
            batch = ray.get(rollout.take_batch.remote(step=0, groups=2, timeout_s=30), timeout=60)
            read, *others = batch.take_experts().values()
            kept = read.read()
            copy = kept.copy()
            os.kill(pid_of("forgets"), signal.SIGKILL)
            with pytest.raises(ray.exceptions.ActorDiedError):
                ray.get(rollout.status.remote(), timeout=30)
            with pytest.raises(NotFound):
                rollout_svc.ray.connect("forgets")
            assert (kept == copy).all()
            started = time.monotonic()
            told = [_said(handle) for handle in others]  # what is on this node may be there for a while
            assert all(one == f"{kept.nbytes} bytes" or "take the same step again" in one for one in told), told
            assert time.monotonic() - started < _LOST_S
            del kept, read, others, batch
            assert settles_at(before)
        finally:
            rollout_svc.ray.stop(rollout)


def _said(handle: Any) -> str:
    """Read a tensor whose owner is gone: how much there is, or why there is none."""
    try:
        return f"{handle.read().nbytes} bytes"
    except SpentHandle as error:
        return str(error)
