"""The owner of shards: one handle each, a lease each, and a cap for all."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors import Handles, Tally
from rollout_svc.tensors.shards import Meta, ShardOwner
from rollout_svc.tensors.shards.leaves import Blank, describe, payload
from tests.tensors.shards.test_buffer import Clock

ADDRESS = "http://127.0.0.1:1"


def _owner(clock: Clock | None = None, *, max_bytes: int = 100, lease_s: float = 10.0) -> ShardOwner:
    return ShardOwner(ADDRESS, max_bytes=max_bytes, lease_s=lease_s, clock=clock or Clock())


def test_a_shard_is_held_until_it_is_dropped() -> None:
    """P27: one handle of kind `shard`, released once; the account is that of the handles."""
    handles = Handles(debug=True)
    owner = ShardOwner(ADDRESS, handles=handles)
    shard, meta = owner.put(np.arange(3, dtype=np.int16))
    assert (shard.owner, shard.nbytes, meta) == (ADDRESS, 6, Meta((3,), "int16", "numpy"))
    assert handles.live == {"shard": Tally(1, 6)}
    assert handles.listed()[0].holder == shard.id
    found = owner.find(shard.id)
    assert found is not None
    assert found.data.view(np.int16).tolist() == [0, 1, 2]
    assert not found.data.flags.writeable
    assert owner.drop([shard.id, "nobody's"]) == (1, 6)
    assert owner.drop([shard.id]) == (0, 0)
    assert (owner.find(shard.id), handles.live, handles.lost) == (None, {}, {})
    assert found.data.view(np.int16).tolist() == [0, 1, 2]  # whoever is sending it goes on


def test_what_does_not_fit_is_refused_with_the_sizes() -> None:
    """Bounded: nothing is evicted for it, and after a drop it fits."""
    owner = _owner(max_bytes=10)
    shard, _ = owner.put(np.zeros(8, dtype=np.uint8))
    with pytest.raises(ShardFailure, match=r"full: 3 bytes do not fit .*: 8 of 10 bytes are held in 1 shards"):
        owner.put(np.zeros(3, dtype=np.uint8))
    owner.drop([shard.id])
    owner.put(np.zeros(10, dtype=np.uint8))
    assert owner.stats()[:4] == (1, 10, 2, 1)


def test_a_shard_whose_ids_were_lost_goes_away() -> None:
    """P29: its lease ends; one that is read, or renewed, stays."""
    clock = Clock()
    owner = _owner(clock)
    read, renewed, lost = (owner.put(np.zeros(1))[0].id for _ in range(3))
    clock.now = 6.0
    assert owner.find(read)
    assert owner.renew([renewed, "nobody's"]) == 1
    clock.now = 10.0
    assert owner.expire() == 1
    assert owner.find(lost) is None
    assert owner.stats().ids == (read, renewed)
    clock.now = 16.0
    stats = owner.stats()
    assert (stats.entries, stats.bytes, stats.expired, stats.dropped) == (0, 0, 3, 0)
    assert owner.handles.live == {}


def test_an_id_is_given_out_once_ever() -> None:
    """After a crash another owner at the same address gives out others: what is meant for the one reaches no other."""
    first, second = _owner(), _owner()
    ids = [owner.put(np.zeros(1))[0].id for owner in (first, second) for _ in range(3)]
    assert len(set(ids)) == 6
    assert second.drop(ids[:3]) == (0, 0)


def test_an_owner_that_nobody_can_reach_gives_out_nothing() -> None:
    """A shard without an address could never be fetched."""
    with pytest.raises(RuntimeError, match="without an address"):
        ShardOwner().put(np.zeros(1))


def test_many_threads_leave_nothing_behind() -> None:
    """P27: puts, reads, drops and expiries at once: every handle ends once."""
    owner = ShardOwner(ADDRESS, lease_s=0.001)

    def work(number: int) -> None:
        ids = [owner.put(np.zeros(number % 5))[0].id for _ in range(20)]
        owner.find(ids[0])
        owner.renew(ids[:5])
        owner.drop(ids[::2])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(40)))
    owner.close()
    owner.close()
    assert owner.stats()[:2] == (0, 0)
    assert owner.stats().dropped + owner.stats().expired == 800
    assert (owner.handles.live, owner.handles.lost) == ({}, {})


OPERATION = st.tuples(st.sampled_from(["put", "find", "renew", "drop", "wait"]), st.integers(0, 7))


@given(st.lists(OPERATION, max_size=60))
def test_the_account_of_an_owner_adds_up(operations: list[tuple[str, int]]) -> None:
    """P27: after any history it holds what was put, neither dropped nor left alone for as long as a lease."""
    clock = Clock()
    owner = _owner(clock, max_bytes=1_000_000, lease_s=5.0)
    touched: dict[str, float] = {}
    put: list[str] = []
    for what, number in operations:
        if what == "wait":
            clock.now += number
            touched = {shard_id: then for shard_id, then in touched.items() if then + 5.0 > clock.now}
        elif what == "put":
            put.append(owner.put(np.zeros(3, dtype=np.uint8))[0].id)
            touched[put[-1]] = clock.now
        elif put:
            shard_id = put[number % len(put)]
            there = shard_id in touched
            if what == "drop":
                assert owner.drop([shard_id]).entries == there
                touched.pop(shard_id, None)
            else:
                assert bool(owner.find(shard_id) if what == "find" else owner.renew([shard_id])) == there
                if there:
                    touched[shard_id] = clock.now
        stats = owner.stats()
        assert (stats.entries, stats.bytes) == (len(touched), 3 * len(touched))
        assert stats.put == stats.entries + stats.dropped + stats.expired
        assert owner.handles.live == ({"shard": Tally(len(touched), 3 * len(touched))} if touched else {})
        ends = [touched[shard_id] for shard_id in stats.ids]
        assert all(sooner <= later for sooner, later in pairwise(ends))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float64", "int64", "bool", "complex64"])
def test_every_dtype_keeps_its_bytes(dtype: str) -> None:
    """What is sent is what is there: no dtype is read as another one, also those that NumPy has not."""
    tensor = torch.arange(256, dtype=torch.uint8)
    tensor = tensor % 2 == 0 if dtype == "bool" else tensor.view(getattr(torch, dtype))
    meta, data = describe(tensor), payload(tensor)
    blank = Blank(meta, data.nbytes)
    blank.memory[:] = data.data
    back = blank.filled()
    assert back.dtype == tensor.dtype
    assert payload(back).tolist() == data.tolist()


def test_what_has_no_plain_bytes_is_refused() -> None:
    """Objects, sparse and quantised tensors, and dtypes that are none, are named; nothing is guessed."""
    with pytest.raises(ShardFailure, match="dtype object"):
        describe(np.array([{}]))
    with pytest.raises(ShardFailure, match="sparse_coo"):
        describe(torch.eye(2).to_sparse())
    for meta in (Meta((1,), "object", "numpy"), Meta((1,), "f4,f4", "numpy"), Meta((1,), "Tensor", "torch")):
        with pytest.raises(ShardFailure, match="invalid"):
            Blank(meta, 8)
    for shape in ((3,), (-2, -1), (2, -1, -1)):
        with pytest.raises(ShardFailure, match=r"2 bytes are no uint8|8 bytes are no"):
            Blank(Meta(shape, "uint8", "numpy"), 8 if shape == (3,) else 2)


def test_what_has_no_bytes_here_is_refused() -> None:
    """Sharded, offloaded and freed tensors keep their shapes: zeros, or whatever lies there now, are never sent."""
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    for tensor, told in (
        (freed, "given back"),
        (torch.ones(3, device="meta"), "on meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
        (fake, "FakeTensor"),
    ):
        with pytest.raises(ShardFailure, match=told):
            _owner().put(tensor)
    with pytest.raises(ShardFailure, match="mask would be lost"):
        _owner().put(np.ma.array([1, 2], mask=[False, True]))


def test_bytes_are_little_endian_and_in_rows() -> None:
    """Whatever the order in memory was."""
    assert bytes(payload(np.array([1, 2], dtype=">i2"))) == b"\1\0\2\0"
    assert describe(np.array([1], dtype=">i2")).dtype == "int16"
    assert payload(np.arange(6, dtype=np.uint8).reshape(2, 3).T).tolist() == [0, 3, 1, 4, 2, 5]
    assert payload(torch.arange(6, dtype=torch.uint8).reshape(2, 3).t()).tolist() == [0, 3, 1, 4, 2, 5]
    assert payload(torch.tensor([1 + 2j]).conj()).view(np.float32).tolist() == [1.0, -2.0]
