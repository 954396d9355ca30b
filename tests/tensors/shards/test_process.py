"""One fetcher, and one fetch buffer, per process."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from rollout_svc.tensors.rtensor import flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import Fetcher, Node, ShardOwner, fetch_buffer, fetcher, install


@pytest.fixture
def own() -> Iterator[Fetcher]:
    """A fetcher of this process for one test."""
    made = Fetcher(token="a token")
    before = install(made)
    yield made
    made.close()
    if before is not None:
        install(before)


def test_everything_goes_through_the_one_of_the_process(own: Fetcher) -> None:
    """P29: what `localize` fetches without being told where is in the buffer that is drained."""
    with Node(ShardOwner(), fetch_buffer(), token="a token") as node:
        remote = remotize([np.arange(4)], node)
        assert remote[0].to_local().tolist() == [0, 1, 2, 3]
        assert localize(remote)[0].tolist() == [0, 1, 2, 3]
        assert fetcher() is own
        assert own.client.stats(node.address)["buffer"]["entries"] == 1
        own.client.post(node.address, "drain", flatten_shard_ids(remote))
        assert fetch_buffer().stats()[:2] == (0, 0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_one_of_its_own(own: Fetcher) -> None:
    """P29: it shares no connection with its parent, and holds nothing that nobody would drain."""
    with Node(ShardOwner(), token="a token") as node:
        remote = remotize(np.arange(4), node)
        assert localize(remote).tolist() == [0, 1, 2, 3]
        pid = os.fork()
        if not pid:
            fresh = fetcher() is not own and fetch_buffer().stats()[:2] == (0, 0)
            os._exit(0 if fresh and localize(remote, timeout_s=20).tolist() == [0, 1, 2, 3] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert own.buffer.stats()[:6] == (1, 32, 0, 0, 0, 1)
