"""The shared buffer from both ends, over many updates: whatever is sent arrives bit for bit, and nothing is left."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from rollout_svc.embedded import receiving
from rollout_svc.embedded.receiving import Receiver
from rollout_svc.tensors.shared import own_prefix
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.senders.protocol import Engine, Named
from rollout_svc.weights.senders.shared_memory import SharedMemorySender
from rollout_svc.weights.slab import SharedSlab

ENGINES = [Engine("w0", "sglang", 1), Engine("w1", "sglang", 1)]
_NOT_COPIED = re.compile(r"torch\.(q.*|bits.*|u?int[1-7]|complex32|float4.*)")
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not _NOT_COPIED.fullmatch(str(dtype))
    },
    key=str,
)
"""Every type that torch can copy, strides and all."""


class Ends:
    """A sender and two receivers, and what each has loaded."""

    def __init__(self, bucket_bytes: int) -> None:
        self.sender = SharedMemorySender(bucket_bytes)
        self.bucket_bytes = bucket_bytes
        self.receivers = {engine.engine_id: Receiver() for engine in ENGINES}
        self.loaded: dict[str, dict[str, torch.Tensor]] = {}

    def update(self, tensors: Sequence[Named]) -> list[set[str]]:
        """Make one update; what the call for each bucket carried."""
        self.loaded = {engine.engine_id: {} for engine in ENGINES}
        self.sender.open(ENGINES)
        carried = []
        for bucket in cut(tensors, self.bucket_bytes, "bytes"):
            bodies = self.sender.write(bucket)
            for name, receiver in self.receivers.items():
                receiver.receive(bodies[name], partial(_keep, self.loaded[name]))
            carried.append({"buffer", "event"} & bodies["w0"].keys())
        for receiver in self.receivers.values():
            receiver.end()
        self.sender.close(whole=True)
        return carried


def _keep(into: dict[str, torch.Tensor], views: Sequence[Named]) -> None:
    into.update({name: view.clone() for name, view in views})


def segments() -> list[Path]:
    """This process's segments of weight updates."""
    return list(receiving.FOLDER.glob(f"{own_prefix(receiving.PREFIX)}*"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Give both ends, with buckets of 64 bytes; nothing may be left of them."""
    before = set(segments())
    made = Ends(64)
    yield made
    made.sender.release()
    assert set(segments()) == before


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether they are equal bit for bit, not a number included."""
    wanted = wanted.contiguous()
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, wanted)]
    return found.dtype is wanted.dtype and found.shape == wanted.shape and torch.equal(*raw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(ends: Ends, dtype: torch.dtype) -> None:
    """P26: eight bits or a hundred and twenty-eight, scalars, nothing at all, and strides."""
    top = 2 if dtype is torch.bool else 96
    filled = (torch.arange(96, dtype=torch.uint8) % top).repeat(dtype.itemsize).view(dtype)
    tensors = [
        ("scalar", filled[:1].reshape(())),
        ("none", filled[:0].reshape(0, 3)),
        ("odd", filled[:3]),
        ("strided", filled[:24].reshape(4, 6).t()),
        ("every other", filled[:24].reshape(4, 6)[:, ::2]),
        ("large", filled),
    ]
    ends.update(tensors)
    for name in ends.receivers:
        assert all(same(ends.loaded[name][at], wanted) for at, wanted in tensors)


def test_two_names_of_one_storage_arrive_as_two(ends: Ends) -> None:
    """P26: tied weights are written twice, each where it belongs."""
    tied = torch.arange(8.0)
    ends.update([("a", tied), ("b", tied), ("c", tied[2:6])])
    assert [ends.loaded["w0"][at].tolist() for at in "abc"] == [tied.tolist(), tied.tolist(), tied[2:6].tolist()]


def test_a_buffer_that_was_replaced_in_the_middle_travels_again(ends: Ends) -> None:
    """P26: a tensor that is larger than the buffer has another made; the old one's name goes."""
    tensors = [(f"t{size}", torch.full((size,), float(size))) for size in (4, 16, 17, 4, 64, 4)]
    both: set[str] = {"buffer", "event"}
    assert ends.update(tensors) == [both, set(), both, set(), both, set()]
    assert all(same(ends.loaded["w1"][at], wanted) for at, wanted in tensors)
    assert len(segments()) == 1
    assert ends.update(tensors) == [both, *[set()] * 5], "the second update allocates nothing"


def test_a_buffer_whose_name_was_taken_away_is_replaced(ends: Ends) -> None:
    """P24 P30: by whoever cleans shared memory up between two updates: an engine maps it by its name."""
    ends.update([("a", torch.ones(4))])
    for taken_by_another in (False, True):
        [segment] = segments()
        segment.unlink()
        if taken_by_another:
            segment.write_bytes(b"x")
        ends.receivers = {name: Receiver() for name in ends.receivers}
        ends.update([("a", torch.full((4,), 2.0))])
        assert ends.loaded["w0"]["a"].tolist() == [2.0] * 4


def test_no_room_is_said_and_leaves_nothing(ends: Ends) -> None:
    """P26 P30: before a byte is written; the next update finds room again."""
    with pytest.raises(OSError, match=r"No space|File too large"):
        SharedSlab(2**56)
    assert segments() == []
    ends.update([("a", torch.ones(4))])


def test_two_hundred_updates_leave_nothing_behind(ends: Ends) -> None:
    """P30: descriptors, mappings and names are those of the first."""

    def held() -> tuple[int, int, int]:
        gc.collect()  # what other tests had mapped
        maps = Path("/proc/self/maps").read_text().count(receiving.PREFIX)
        return len(list(Path("/proc/self/fd").iterdir())), maps, len(segments())

    tensors = [(f"t{place}", torch.full((8,), float(place))) for place in range(4)]
    ends.update(tensors)
    before = held()
    for _ in range(200):
        ends.update(tensors)
    assert held() == before
    assert ends.sender.allocated == 64
