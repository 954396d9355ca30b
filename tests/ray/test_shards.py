"""Shards whose owners are actors: the same promises, without a socket of ours."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.rtensor import flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import Fetcher, Node, ShardOwner
from rollout_svc.tensors.shards.ray_plane import RayKeeper, RayOwner, RayTransport, address_of, start_owner
from tests.ray.test_ray_store import _objects

pytestmark = pytest.mark.usefixtures("ray_cluster")

NAMESPACE = "shards"
BIG = 2**20


class Worker(RayOwner):
    """A storage owner that consumes as well, as a trainer's rank does."""

    def produce(self, size: int) -> Any:
        """Store a tensor of its own."""
        return remotize({"ones": np.ones(size, dtype=np.uint8)}, self.shards)

    def consume(self, tree: Any) -> list[int]:
        """Fetch tensors, its own and those of others."""
        return [int(tensor.sum()) for tensor in localize(tree, timeout_s=30)["all"]]


@pytest.fixture(scope="module")
def owner(ray_cluster: str) -> Iterator[Any]:
    """An owner of shards that lie in Ray's object store."""
    import ray

    actor = start_owner("owner", NAMESPACE, store="ray")
    yield actor
    ray.kill(actor)


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    """A consumer in this process."""
    fetcher = Fetcher()
    yield fetcher
    fetcher.close()


@pytest.mark.timeout(120)
def test_what_an_actor_owns_comes_back_and_goes(owner: Any, fetcher: Fetcher) -> None:
    """P27, P29: bf16 stays bf16; after the drop Ray's state API knows of no object: not the shard's, not its way's."""
    before, keeper, transport = _objects(), RayKeeper(address_of("owner", NAMESPACE)), RayTransport()
    tensor = torch.randn(BIG).bfloat16()
    remote = remotize({"a": tensor, "b": [np.arange(3), tensor]}, keeper)
    back = localize(remote, fetcher)
    assert back["a"].dtype == torch.bfloat16
    assert torch.equal(back["a"], tensor)
    assert back["b"][0].tolist() == [0, 1, 2]
    assert back["b"][1] is back["a"]
    assert _objects() == before + 1
    stats = transport.stats(keeper.address)
    assert (stats["owner"]["entries"], stats["owner"]["bytes"]) == (2, 2 * BIG + 24)
    first, second = flatten_shard_ids(remote)
    assert keeper.drop([first]) == {"entries": 1, "bytes": 2 * BIG}
    assert _objects() == before
    fetcher.buffer.drain([first, second])
    found = localize(remote, fetcher, on_failure="place")
    assert (found["a"].reason, found["b"][0].tolist()) == ("missing", [0, 1, 2])
    assert transport.post(keeper.address, "renew", [first, second]) == {"entries": 1}
    keeper.drop([second])


@pytest.mark.timeout(120)
def test_an_owner_that_also_consumes_drains_itself(owner: Any, fetcher: Fetcher) -> None:
    """P29: it reads its own shards and those of others, in Ray and over HTTP; a drop pops its buffer as well."""
    import ray

    settings = {"name": "worker", "namespace": NAMESPACE, "num_cpus": 0}
    worker: Any = ray.remote(Worker).options(**settings).remote("worker", NAMESPACE)
    address, transport = address_of("worker", NAMESPACE), RayTransport()
    with Node(ShardOwner()) as node:
        theirs = remotize(np.full(10, 2, dtype=np.uint8), RayKeeper(address_of("owner", NAMESPACE)))
        ours: Any = remotize(np.full(10, 3, dtype=np.uint8), node)
        own = ray.get(worker.produce.remote(10), timeout=60)
        assert own["ones"].shard.owner == address
        tree = {"all": [own["ones"], theirs, ours]}
        assert ray.get(worker.consume.remote(tree), timeout=60) == [10, 20, 30]
        assert localize(own, fetcher)["ones"].sum() == 10
        stats = transport.stats(address)
        assert (stats["owner"]["entries"], stats["buffer"]["entries"], stats["buffer"]["bytes"]) == (1, 3, 30)
        ids = flatten_shard_ids(tree)
        for each in (address, theirs.shard.owner):
            assert transport.post(each, "drop", ids)["entries"] == 1
        stats = transport.stats(address)
        assert (stats["owner"]["entries"], stats["buffer"]["entries"], stats["buffer"]["bytes"]) == (0, 0, 0)
        assert transport.post(address, "flush", None) == {"entries": 0, "bytes": 0}
    ray.kill(worker)


@pytest.mark.timeout(120)
def test_an_owner_that_died_is_named(owner: Any, fetcher: Fetcher) -> None:
    """Its shards fail as unreachable, those of others do not; a cap is told as what it is."""
    import ray

    mortal = start_owner("mortal", NAMESPACE, max_bytes=100)
    keeper = RayKeeper(address_of("mortal", NAMESPACE))
    lost = remotize(np.zeros(100, dtype=np.uint8), keeper)
    with pytest.raises(ShardFailure, match=r"full: 1 bytes do not fit .*: 100 of 100 bytes are held"):
        keeper.put(np.zeros(1, dtype=np.uint8))
    kept = remotize(np.arange(4), RayKeeper(address_of("owner", NAMESPACE)))
    ray.kill(mortal)
    found = localize([lost, kept], fetcher, on_failure="place", timeout_s=30)
    assert (found[0].reason, found[1].tolist()) == ("unreachable", [0, 1, 2, 3])
    assert remotize(3, keeper) == 3
    RayTransport().post(address_of("owner", NAMESPACE), "drop", flatten_shard_ids(kept))
