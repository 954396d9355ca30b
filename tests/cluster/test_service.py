"""The service as an actor, its engines on nodes of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.configs import ON_HEAD, engine, lines, service
from tests.cluster.nodes import HEAD, OTHERS, Nodes


@pytest.mark.short
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nodes")
def test_a_trainer_takes_batches_over_ray() -> None:
    """The calls are those of the service; engines are at the addresses of their nodes; nothing is left at the end."""
    import ray

    import rollout_svc.ray

    config = service(*(engine(at=address) for address in OTHERS[:2]), cluster={"kind": "ray", "strategy": "spread"})
    rollout = rollout_svc.ray.start(config, name="takes", **ON_HEAD)
    try:
        assert ray.get(rollout.put_prompts.remote("t", lines(8)), timeout=30) == {"accepted": 8}
        batch = ray.get(rollout.take_batch.remote(step=0, groups=4, timeout_s=30), timeout=40)
        assert (batch["step"], len(batch["groups"])) == (0, 4)
        again = ray.get(rollout.take_batch.remote(step=1, groups=4, timeout_s=30), timeout=40)
        assert not {g["group_id"] for g in again["groups"]} & {g["group_id"] for g in batch["groups"]}
        status = ray.get(rollout_svc.ray.connect("takes").status.remote(), timeout=10)
        assert status["ledger"]["groups"]["consumed"] == 4
        assert [worker["url"].split(":")[1] for worker in status["workers"]] == [f"//{at}" for at in OTHERS[:2]]
        assert HEAD not in str(status["workers"])
        assert ray.get(rollout.pause.remote(deadline_s=5.0), timeout=10)["clean"]
    finally:
        rollout_svc.ray.stop(rollout)


def test_the_nodes_are_as_they_are_said_to_be(nodes: Nodes) -> None:
    """Four, each with something of its own to be placed by."""
    import ray

    resources: Any = ray.cluster_resources
    assert {f"at-{address}" for address in (HEAD, *OTHERS)} <= set(resources())
    assert nodes.address.startswith(HEAD)
