"""Ray's object store, as the watch on memory reads it."""

from __future__ import annotations

import itertools

import numpy as np

from rollout_svc.observe.memory.foreign import RayBytes

MB = 10**6


def test_the_object_store_is_read(ray_cluster: str) -> None:
    """What is put is in `ray_store`, what does not fit is in `ray_spilled`, and what nobody refers to is in neither."""
    import ray

    assert ray_cluster
    asked = RayBytes(itertools.count(0, 100).__next__)
    before = asked.read()
    assert asked.trouble == ""
    assert before["ray_spilled"] == 0
    reference = ray.put(np.ones(20 * MB, dtype=np.uint8))
    assert asked.read()["ray_store"] >= 20 * MB  # what others put before may have gone meanwhile
    more = [ray.put(np.ones(60 * MB, dtype=np.uint8)) for _ in range(6)]  # the store has 256 MB
    assert asked.read()["ray_spilled"] >= 60 * MB
    assert more
    del reference, more
