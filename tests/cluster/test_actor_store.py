"""The object store full: what is lent is spilled or kept in the service's memory, and a take never hangs."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.cluster.configs import ON_HEAD, lines, service
from tests.cluster.fakes import fake_engine
from tests.cluster.nodes import Nodes
from tests.cluster.test_actor_batches import experts, settles_at, stored
from tests.support.routing import Routing

HUGE = Routing(num_experts=256, top_k=64, layers=16384, moe_layers=tuple(range(16384)))
"""A sample of 8 tokens has 7 rows of 1 MiB."""
_SAMPLES = 8
"""56 MiB in all."""
_HELD_BYTES = 90 * 2**20
"""Of the 128 MiB of a node's store, that cannot be spilled because they are being looked at."""
_TAKE_S = 60.0
"""Seconds to have the batch, and to read it: two, and one, on a machine that is not busy."""


@pytest.mark.timeout(280)
def test_more_than_the_store_holds_is_spilled(nodes: Nodes) -> None:
    """P2, P27: every sample of a batch reads whole, and all that was spilled is gone after the ack."""
    import ray

    import rollout_svc.ray

    before = stored()
    held = ray.get(ray.put(np.zeros(_HELD_BYTES, dtype=np.uint8)))
    with fake_engine(experts=HUGE) as engine:
        section = experts("ray", nodes.address) | {"layers": 16384}
        trainer = {"train_batch_size": 4, "prompt_repeat_k": 2, "over_sample_threshold": 0.0}
        config = service({"url": engine.url}, experts=section, trainer=trainer, request_timeout_s=120)
        rollout = rollout_svc.ray.start(config, name="full", **ON_HEAD, num_cpus=0.1)
        try:
            ray.get(rollout.put_prompts.remote("t", lines(4)), timeout=30)
            started = time.monotonic()
            batch = ray.get(rollout.take_batch.remote(step=0, groups=4, timeout_s=120), timeout=150)
            assert time.monotonic() - started < _TAKE_S
            samples = {sample["sample_id"]: sample for group in batch["groups"] for sample in group["samples"]}
            started = time.monotonic()
            read = 0
            for name, handle in batch.take_experts().items():
                tokens = samples[name]["prompt_ids"] + samples[name]["response_ids"]
                np.testing.assert_array_equal(handle.read()[:, :4], HUGE.rows(tokens)[:, :4])
                read += handle.nbytes
            assert read == _SAMPLES * 7 * 2**20
            assert time.monotonic() - started < _TAKE_S
            ray.get(rollout.ack.remote(batch["batch_id"]), timeout=30)
            assert not held.any()
            del held
            assert settles_at(before)
            assert ray.get(rollout.status.remote(), timeout=30)["state"] == "running"
        finally:
            rollout_svc.ray.stop(rollout)
