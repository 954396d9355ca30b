"""Tensors in Ray's object store: the object goes when its one reference does."""

import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout_svc.ray.batch import TakenBatch, TimedLoan
from rollout_svc.tensors import Handles, make_store
from rollout_svc.tensors.ray_store import InRay

pytestmark = pytest.mark.usefixtures("ray_cluster")

_BYTES = 2**20


def _objects() -> int:
    """How many big objects there are, in Ray's own words."""
    import ray
    from ray.util.state import list_objects

    found = list_objects(address=ray.get_runtime_context().gcs_address, timeout=20)
    return len({one.object_id for one in found if one.object_size >= _BYTES})


def test_a_released_handle_leaves_no_object() -> None:
    """P27: Ray's state API lists the object while its handle lives, and not once it was released."""
    handles, store, before = Handles(), make_store("ray"), _objects()
    routing = np.arange(_BYTES, dtype=np.uint8).reshape(-1, 4, 2)
    handle = handles.hold(store.put(routing), kind="experts", holder="g1.0")
    assert _objects() == before + 1
    seen = handle.read()
    np.testing.assert_array_equal(seen, routing)
    with pytest.raises(ValueError, match="read-only"):
        seen[0, 0, 0] = 1
    handle.release("the ack")
    del seen
    assert _objects() == before
    assert handles.live == {}


def test_a_forgotten_handle_leaves_no_object() -> None:
    """P27: neither does one that its holder forgot; that it was forgotten is counted."""
    handles, store, before = Handles(), make_store("ray"), _objects()
    handles.hold(store.put(np.zeros(_BYTES, dtype=np.uint8)), kind="experts", holder="g1.0")
    assert _objects() == before
    assert handles.lost == {"experts": 1}


def test_a_reference_is_not_pickled_out_of_band() -> None:
    """P27: Ray would keep its object for good; neither the handle nor what is taken from it lets that happen."""
    handles, store = Handles(), make_store("ray")
    handle = handles.hold(store.put(np.zeros(8, dtype=np.uint8)), kind="experts", holder="g1.0")
    with pytest.raises(TypeError, match="two owners"):
        pickle.dumps({"experts": handle})
    stored = handle.take("the test")
    with pytest.raises(TypeError, match="out of band"):
        pickle.dumps(stored)
    stored.free()
    with pytest.raises(ValueError, match="was freed"):
        stored.view()


@pytest.fixture
def never() -> Iterator[InRay]:
    """A tensor that no node sends: what makes it does not end."""
    import ray

    remote: Any = ray.remote
    held: Any = remote(lambda: time.sleep(600)).options(num_cpus=0).remote()
    yield InRay(held, 6, (1, 2, 3))
    ray.cancel(held, force=True)


@pytest.mark.timeout(60)
def test_a_tensor_that_does_not_come_is_not_waited_for_for_ever(never: InRay) -> None:
    """P8: whoever reads it is told what it waited for, after as long as it has: as a batch is lent, for instance."""
    with pytest.raises(TimeoutError, match=r"a tensor of 6 bytes, \(1, 2, 3\), did not come .* within 0\.2 s"):
        never.view(0.2)
    batch = TakenBatch({"batch_id": "b"}, {"s": never}, TimedLoan("b", time.time() + 2.0))
    with pytest.raises(TimeoutError, match=r"routed experts of s: a tensor of 6 bytes"):
        batch.take_experts()["s"].read()
