"""Tensors in shared memory: named while they live, gone afterwards, whatever became of their process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rollout_svc.tensors import Handles, make_store
from rollout_svc.tensors.shared import SharedStore, attach, own_prefix

_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from rollout_svc.tensors.shared import SharedStore
kept = SharedStore(Path(sys.argv[1])).put(np.ones(8, dtype=np.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""


@given(arrays(st.sampled_from([np.uint8, np.uint16, np.float32]), array_shapes(min_dims=0, min_side=0, max_side=5)))
def test_what_is_put_is_what_is_read(tensor: np.ndarray) -> None:
    """Any shape and dtype comes back, here and in whoever attaches, and nobody can write to it."""
    store = SharedStore()
    stored = store.put(tensor)
    for seen in (stored.view(), attach(stored.name, stored.shape, stored.dtype)):
        np.testing.assert_array_equal(seen, tensor)
        assert seen.dtype == tensor.dtype
        assert not seen.flags.writeable
    stored.free()
    stored.free()
    store.close()


def test_a_freed_tensor_has_no_name(tmp_path: Path) -> None:
    """P27: a released handle leaves nothing in shared memory; who reads it meanwhile keeps what it read."""
    handles, store = Handles(), SharedStore(tmp_path)
    handle = handles.hold(store.put(np.arange(8, dtype=np.uint8)), kind="experts", holder="g1.0")
    seen = handle.read()
    assert len(list(tmp_path.iterdir())) == 1
    handle.release("the ack")
    assert list(tmp_path.iterdir()) == []
    assert seen.tolist() == list(range(8))


def test_tensors_take_no_descriptors(tmp_path: Path) -> None:
    """P27: thousands of them leave those that connections need; and a mapping goes with the last who reads."""
    before, store = len(list(Path("/proc/self/fd").iterdir())), SharedStore(tmp_path)
    kept = [store.put(np.ones(8, dtype=np.uint8)) for _ in range(50)]
    seen = [attach(one.name, one.shape, one.dtype, tmp_path) for one in kept]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines()) == 100
    with pytest.raises(ValueError, match="WRITEABLE"):
        seen[0].setflags(write=True)
    for one in kept:
        one.free()
    assert seen[0].sum() == 8
    seen.clear()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_closed_store_leaves_no_name(tmp_path: Path) -> None:
    """What nobody freed goes when the store does."""
    store = SharedStore(tmp_path)
    kept = store.put(np.zeros(8))
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert kept.view().sum() == 0


def test_what_a_killed_process_left_goes_with_the_next_store(tmp_path: Path) -> None:
    """P27: kill -9 leaks until the next start, and no longer; what living ones have stays."""
    living = SharedStore(tmp_path)
    stored = living.put(np.zeros(8))
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    SharedStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [stored.name]


def test_what_another_container_has_there_stays(tmp_path: Path) -> None:
    """P27: it may share the folder and number its processes itself: a number that is nobody's here is somebody's."""
    here = own_prefix("").split("-")[2]
    theirs, dead = (f"rollout-svc-{2**22 + 1}-7-{namespace}-ab-0" for namespace in ("1", here))
    for name in (theirs, dead):
        (tmp_path / name).touch()
    SharedStore(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [theirs]


def test_what_others_keep_there_stays(tmp_path: Path) -> None:
    """Only what this kind of segment was named by this project is looked at, whatever its name begins with."""
    kept = {"rollout-svc-weights-1-2-ab", "rollout-svc-x", "psm_1234"}
    for name in kept:
        (tmp_path / name).touch()
    SharedStore(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_no_room_is_said_before_a_byte_is_written(tmp_path: Path) -> None:
    """P35: more than there is room for is an error, and leaves no name behind."""
    store = SharedStore(tmp_path)
    with pytest.raises(OSError, match=r"No space|File too large"):
        store.put(np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**56,), (0,)))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """P35: without shared memory the store is not made."""
    with pytest.raises(OSError, match="no shared memory"):
        SharedStore(tmp_path / "none")


@pytest.mark.parametrize("name", ["../etc/passwd", "rollout-svc-/../x", "other"])
def test_nothing_else_is_attached(name: str, tmp_path: Path) -> None:
    """P34: a name leads nowhere but to a segment of ours."""
    with pytest.raises(ValueError, match="no segment of this service"):
        attach(name, (1,), "uint8", tmp_path)


def test_the_stores_have_names() -> None:
    """What `experts.store` says is what is made."""
    assert [make_store(name).name for name in ("memory", "shared")] == ["memory", "shared"]
