"""Handles: one owner each, exactly one end, and an account that adds up."""

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollout_svc.errors import SpentHandle
from rollout_svc.tensors import Handle, Handles, LiveHandle, MemoryStore, Tally


def _hold(handles: Handles, size: int = 8, kind: str = "experts", holder: str = "g1.0") -> Handle:
    return handles.hold(MemoryStore().put(np.zeros(size, dtype=np.uint8)), kind=kind, holder=holder)


def test_take_hands_over_exactly_once() -> None:
    """P27: the second taker is told who was first."""
    handle = _hold(Handles())
    stored = handle.take("the batch")
    assert stored.view().nbytes == 8
    with pytest.raises(SpentHandle, match=r"8 bytes \(experts\) was taken by another after the batch, who took it"):
        handle.take("another")
    assert not handle.alive


def test_release_is_idempotent_and_names_who_did_it() -> None:
    """P27: what is read after its release says who released it."""
    handle = _hold(Handles())
    assert handle.release("the ack of step 3")
    assert not handle.release("the ack of step 4")
    with pytest.raises(SpentHandle, match="was read after the ack of step 3, who released it"):
        handle.read()


def test_a_view_outlives_the_release_and_cannot_be_written_to() -> None:
    """P27: whoever reads keeps what it read, and nobody writes through a handle."""
    handle = _hold(Handles())
    seen = handle.read()
    handle.release("its owner")
    assert seen.tolist() == [0] * 8
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(tensor=arrays(st.sampled_from(["u1", "u2", "f4", "?"]).map(np.dtype), SHAPES), backwards=st.booleans())
def test_what_is_kept_is_seen_as_it_is_and_cannot_be_made_writable(tensor: np.ndarray, backwards: bool) -> None:
    """P27: of any shape, strided or not; its bytes are not copied, and a reader that asks for more gets an error."""
    given_one = tensor[::-1] if backwards and tensor.ndim else tensor
    seen = MemoryStore().put(given_one).view()
    assert (seen.dtype, seen.shape) == (given_one.dtype, given_one.shape)
    np.testing.assert_array_equal(seen, given_one)
    assert np.shares_memory(seen, given_one) or not given_one.size
    for array in (seen, seen[...], seen.view()):
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.setflags(write=True)


def test_a_handle_is_not_pickled() -> None:
    """P27: a copy would be a second owner."""
    with pytest.raises(TypeError, match="two owners"):
        pickle.dumps(_hold(Handles()))


def test_what_its_holder_forgot_is_freed_and_counted() -> None:
    """P27: a forgotten handle does not pass in silence."""
    handles = Handles()
    _hold(handles)
    gc.collect()
    assert handles.live == {}
    assert handles.lost == {"experts": 1}


def test_each_live_handle_is_listed_with_its_holder_where_asked() -> None:
    """P27: in debug mode leaks have names; otherwise nothing is kept of them."""
    handles, silent = Handles(debug=True), Handles()
    first, second, third = _hold(handles), _hold(handles, 4, "shard", "owner 2"), _hold(silent)
    assert list(handles) == [LiveHandle("experts", 8, "g1.0"), LiveHandle("shard", 4, "owner 2")]
    first.release("the test")
    assert handles.listed() == [LiveHandle("shard", 4, "owner 2")]
    assert silent.listed() == []
    assert second.alive
    assert third.alive


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["hold", "take", "release"]), st.integers(0, 99))))
def test_the_account_is_what_is_alive(steps: list[tuple[int, str, int]]) -> None:
    """P27: after any history the account counts those that have not ended, by kind."""
    handles = Handles()
    alive: dict[int, Handle] = {}
    for place, what, size in steps:
        if what == "hold" and place not in alive:
            alive[place] = _hold(handles, size, f"kind-{place % 2}")
        elif place in alive:
            handle = alive.pop(place)
            assert handle.take("it") if what == "take" else handle.release("it")
        expected: dict[str, Tally] = {}
        for handle in alive.values():
            known = expected.get(handle.kind, Tally(0, 0))
            expected[handle.kind] = Tally(known.handles + 1, known.bytes + handle.nbytes)
        assert handles.live == expected
    for handle in alive.values():
        handle.release("the end")
    assert handles.live == {}
    assert handles.lost == {}


def test_of_many_threads_one_releases() -> None:
    """P27: exactly once, whoever tries."""
    handles = Handles()
    held = [_hold(handles) for _ in range(200)]
    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda index: held[index % 200].release(f"thread {index}"), range(1600)))
    assert sum(done) == 200
    assert handles.live == {}
