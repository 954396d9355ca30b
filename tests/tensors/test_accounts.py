"""What remote tensors come to in a trainer's process, for a watch on its memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from rollout_svc.observe.memory import MemoryWatch, Probe
from rollout_svc.tensors.accounts import tensor_bytes
from rollout_svc.tensors.rtensor import flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import FetchBuffer, Fetcher, Node, ShardOwner, install

STEP_BYTES = 2**22


@pytest.fixture
def consumer() -> Iterator[Fetcher]:
    """The fetcher of this process."""
    mine = Fetcher(FetchBuffer())
    before = install(mine)
    yield mine
    install(before or Fetcher())
    mine.close()


def test_a_buffer_that_nobody_drains_is_named_where_it_is(consumer: Fetcher) -> None:
    """P30: 4 MB a step on a consumer: the watch says `fetch_buffers`, and not that the heap grows somehow."""
    with Node(ShardOwner()) as node:
        assert node.owner is not None
        owner = node.owner
        watch, probe = MemoryWatch(), Probe(accounts=lambda: tensor_bytes(owner.handles))
        named = set()
        for step in range(24):
            remote = remotize(np.ones(STEP_BYTES, dtype=np.uint8), node)
            localize(remote)
            own = probe.read()["service"]
            assert (own["fetch_buffers"], own["handles.shard"]) == ((step + 1) * STEP_BYTES, STEP_BYTES)
            named |= {growth.account for growth in watch.record(step, "service", own).growing}
            owner.drop(flatten_shard_ids(remote))
        assert "fetch_buffers" in named
        assert "python_heap" not in named
        consumer.buffer.flush_all()
        assert tensor_bytes(owner.handles) == {"fetch_buffers": 0}
