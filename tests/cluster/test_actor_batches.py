"""Batches and their routed experts by reference: who holds them, until when, and what is left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_svc.errors import SpentHandle
from rollout_svc.ray.thread import THREAD
from tests.cluster.configs import ON_HEAD, lines, service
from tests.cluster.fakes import fake_engine
from tests.cluster.nodes import Nodes
from tests.support.routing import Routing

WIDE = Routing(num_experts=256, top_k=64, layers=512, moe_layers=tuple(range(512)))
"""A sample of 8 tokens has 7 rows of 32 KiB: what nobody would send along."""
ROWS = 7
SAMPLE_BYTES = ROWS * 512 * 64
_GONE_S = 20.0
_HOLDER = """
import os, sys, ray, rollout_svc.ray
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
rollout = rollout_svc.ray.connect("lends")
batch = ray.get(rollout.take_batch.remote(step=int(sys.argv[2]), groups=2, timeout_s=60), timeout=90)
held = [one.read() for one in batch.take_experts().values()]
print("holds:", batch["batch_id"], *sorted(group["group_id"] for group in batch["groups"]), flush=True)
sys.stdin.read()
"""


def experts(store: str, address: str) -> dict[str, Any]:
    """Make the section of a configuration."""
    model = {"num_experts": 256, "top_k": 64, "layers": 512}
    return {"enabled": True, "store": store, "ray_address": address, **model}


def stored() -> int:
    """How many objects are in the cluster's store that are as large as one sample's routing."""
    import ray
    from ray.util.state import list_objects

    # What a process knows of and does not hold itself is left out of the answer, which by default is an error.
    how: dict[str, Any] = {"timeout": 30, "limit": 1000, "raise_on_missing_output": False}
    found = list_objects(address=ray.get_runtime_context().gcs_address, **how)
    return len({one.object_id for one in found if one.object_size >= SAMPLE_BYTES})


def settles_at(count: int) -> bool:
    """Whether that many are left, once Ray has noticed."""
    deadline = time.monotonic() + _GONE_S
    while stored() != count and time.monotonic() < deadline:
        time.sleep(0.2)
    return stored() == count


@pytest.mark.timeout(240)
@pytest.mark.parametrize("store", ["ray", "memory"])
def test_routed_experts_are_read_where_they_lie(nodes: Nodes, store: str) -> None:
    """P27: from the take to the ack and no longer, whatever store the service has; nothing passes through its loop."""
    import ray

    import rollout_svc.ray

    before = stored()
    with fake_engine(experts=WIDE) as engine:
        config = service({"url": engine.url}, experts=experts(store, nodes.address))
        rollout = rollout_svc.ray.start(config, name="lends", **ON_HEAD, num_cpus=0.1)
        try:
            ray.get(rollout.put_prompts.remote("t", lines(6)), timeout=30)
            batch = ray.get(rollout.take_batch.remote(step=0, groups=2, timeout_s=30), timeout=60)
            handles = batch.take_experts()
            samples = {sample["sample_id"]: sample for group in batch["groups"] for sample in group["samples"]}
            assert set(handles) == set(samples)
            assert len(handles) == 4
            for name, handle in handles.items():
                assert handle.nbytes == SAMPLE_BYTES
                tokens = samples[name]["prompt_ids"] + samples[name]["response_ids"]
                np.testing.assert_array_equal(handle.read(), WIDE.rows(tokens))
            kept = handle.read()
            copy = kept.copy()
            with pytest.raises(TypeError, match="out of band"):
                pickle.dumps(batch)
            assert ray.get(ray.remote(num_cpus=0.1)(_total).remote(batch), timeout=60) == 4 * SAMPLE_BYTES
            after = ray.get(rollout.take_batch.remote(step=1, groups=2, timeout_s=30), timeout=60)
            for handle in handles.values():
                with pytest.raises(SpentHandle, match="after the ack of batch"):
                    handle.read()
            with pytest.raises(SpentHandle, match="after the ack of batch"):
                batch.take_experts()
            np.testing.assert_array_equal(kept, copy)
            through = ray.get(rollout.touched.remote(), timeout=30)
            assert sum(through.values()) >= 8 * SAMPLE_BYTES
            assert through.get(THREAD, 0) == 0
            ray.get(rollout.ack.remote(after["batch_id"]), timeout=30)
            del kept
            if store == "memory":
                assert settles_at(before), "the batches that are still here keep nothing once they are acknowledged"
        finally:
            rollout_svc.ray.stop(rollout)
    assert settles_at(before)


def _total(batch: Any) -> int:
    return sum(handle.read().nbytes for handle in batch.take_experts().values())


@pytest.mark.timeout(240)
def test_a_trainer_that_dies_gives_everything_back(nodes: Nodes, tmp_path: Path) -> None:
    """P27, P31: its groups after `lease_s`, for another trainer; what it had read of the store at once."""
    import ray

    import rollout_svc.ray

    before = stored()
    with fake_engine(experts=WIDE) as engine:
        config = service(
            {"url": engine.url},
            experts=experts("ray", nodes.address),
            buffer={"lease_s": 6.0},
            trainer={"train_batch_size": 2, "prompt_repeat_k": 2, "over_sample_threshold": 0.0},
        )
        rollout = rollout_svc.ray.start(config, name="lends", **ON_HEAD, num_cpus=0.1)
        try:
            ray.get(rollout.put_prompts.remote("t", lines(2)), timeout=30)
            with _holder(nodes, tmp_path) as holder:
                assert holder.stdout is not None
                held = next(line for line in holder.stdout if line.startswith("holds:")).split()
                os.kill(holder.pid, signal.SIGKILL)
            died = time.monotonic()
            batch = ray.get(rollout.take_batch.remote(step=0, groups=2, timeout_s=30), timeout=60)
            assert batch["batch_id"] == held[1], "the same step again is the same batch while it is lent"
            while ray.get(rollout.status.remote(), timeout=30)["ledger"]["groups"]["leased"]:
                assert time.monotonic() - died < _GONE_S
                time.sleep(0.1)
            with pytest.raises(SpentHandle, match=r"the lease of batch .* ended"):
                batch.take_experts()
            batch = ray.get(rollout.take_batch.remote(step=1, groups=2, timeout_s=30, ack=None), timeout=60)
            assert batch["batch_id"] != held[1]
            assert sorted(group["group_id"] for group in batch["groups"]) == held[2:]
            ray.get(rollout.ack.remote(batch["batch_id"]), timeout=30)
            del batch
            assert settles_at(before)
        finally:
            rollout_svc.ray.stop(rollout)


def _holder(nodes: Nodes, folder: Path) -> subprocess.Popen[str]:
    with (folder / "stderr").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _HOLDER, nodes.address, "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
