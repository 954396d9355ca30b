"""P29: the end of a step where owners and consumers are actors."""

from typing import Any

import numpy as np
import pytest

from rollout_svc.tensors.clearing import Consumer, RayPeer, SyncController
from rollout_svc.tensors.rtensor import localize, remotize
from rollout_svc.tensors.shards import Plane
from rollout_svc.tensors.shards.ray_plane import RayKeeper, RayOwner, address_of, start_owner

pytestmark = pytest.mark.usefixtures("ray_cluster")

NAMESPACE = "clearing"


class Consumes(RayOwner):
    """A rank of a trainer."""

    def consume(self, tree: Any) -> int:
        """Fetch everything of a tree."""
        return int(sum(tensor.sum() for tensor in localize(tree, timeout_s=30)))


@pytest.mark.timeout(120)
def test_actors_are_cleared_and_one_that_died_returns_with_nothing_owed() -> None:
    """P29: by name or by handle; the one that died is named, and the others are drained all the same."""
    import ray

    start: Any = ray.remote(Consumes).options
    owner = start_owner("owner", NAMESPACE)
    keeper = RayKeeper(address_of("owner", NAMESPACE))
    named, unnamed = (start(num_cpus=0).remote(name, NAMESPACE) for name in ("named", "unnamed"))
    mortal = start(name="mortal", namespace=NAMESPACE, num_cpus=0).remote("mortal", NAMESPACE)
    with SyncController(Plane(), deadline_s=10.0, attempts=1) as controller:
        there = address_of("mortal", NAMESPACE)
        controller.register("actor", [there, Consumer("one", (1,), peer=RayPeer(named))])
        controller.register("critic", [Consumer("two", (0,), peer=RayPeer(unnamed))])

        def step(*alive: Any) -> Any:
            batch = [remotize(np.ones(1000, dtype=np.uint8), keeper) for _ in range(3)]
            assert ray.get([actor.consume.remote(batch) for actor in alive], timeout=30) == [3000] * len(alive)
            return batch

        cleared = controller.clear_batches(step(named, unnamed, mortal))
        assert (cleared.entries, cleared.kept, cleared.statistics.silent, cleared.processes) == (0, (), (), 4)
        batch = step(named, unnamed, mortal)
        ray.kill(mortal)
        cleared = controller.clear_batches(batch)
        assert [(failure.process, len(failure.ids)) for failure in cleared.kept] == [(there, 3)]
        assert (cleared.entries, cleared.statistics.silent) == (0, (there,))
        mortal = start(name="mortal", namespace=NAMESPACE, num_cpus=0).remote("mortal", NAMESPACE)
        cleared = controller.clear_batches(step(named, unnamed, mortal))
        assert (cleared.entries, cleared.kept, cleared.statistics.silent) == (0, (), ())
    for actor in (owner, named, unnamed, mortal):
        ray.kill(actor)
