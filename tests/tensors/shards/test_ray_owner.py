"""An owner that is an actor in Ray, as far as it needs no cluster."""

from collections.abc import Iterator

import numpy as np
import pytest

from rollout_svc.tensors.shards import Fetcher, install
from rollout_svc.tensors.shards.leaves import describe
from rollout_svc.tensors.shards.ray_plane import RayOwner
from tests.support.processes import until


@pytest.fixture(autouse=True)
def _a_fetcher_of_its_own() -> Iterator[None]:
    """An owner is also the consumer of its process."""
    mine = Fetcher()
    before = install(mine)
    yield
    install(before or Fetcher())
    mine.close()


def test_a_lease_ends_where_nobody_calls() -> None:
    """P29: the ids were lost with a crashed receiver, and nobody asks this owner for anything any more."""
    owner = RayOwner("owner", "here", lease_s=0.2)
    data = np.ones(4, dtype=np.uint8)
    owner.keep(describe(data), data)
    assert owner.shards.handles.made == {"shard": 1}
    until(lambda: not owner.shards.handles.live, "the lease has ended")
