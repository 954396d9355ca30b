"""Weights through shared memory: every way in which a receiver could load stale bytes is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_svc.embedded import receiving
from rollout_svc.embedded.receiving import BucketError, EventError, Receiver
from rollout_svc.tensors.shared import own_prefix
from rollout_svc.weights import slab
from rollout_svc.weights.bucket import FlattenedBucket, Layout
from rollout_svc.weights.slab import SharedSlab


class Side:
    """A sender and a receiver, and what was loaded."""

    def __init__(self, folder: Path) -> None:
        self.slab = SharedSlab(256, folder)
        self.receiver = Receiver(folder)
        self.loaded: dict[str, torch.Tensor] = {}

    def call(self, value: float, dtype: torch.dtype = torch.float32, layout: Layout = "elements") -> dict[str, Any]:
        """Write one tensor of this value into the slab, and make the call that carries everything."""
        view = self.slab.tensor(torch.uint8 if layout == "bytes" else dtype)
        with self.slab.writing():
            bucket = FlattenedBucket.pack([("w", torch.full((4,), value, dtype=dtype))], layout, into=view)
        return {
            "metadata": [meta.as_json() for meta in bucket.metadata],
            "layout": layout,
            "written": self.slab.written,
            "require_clone": False,
            "buffer": {**self.slab.handle, "dtype": str(view.dtype).removeprefix("torch.")},
            "event": {"kind": "sequence", "name": self.slab.name},
        }

    def receive(self, call: dict[str, Any]) -> None:
        """Load a call."""
        self.receiver.receive(call, lambda views: self.loaded.update({name: view.clone() for name, view in views}))


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    """Give both sides over a folder of their own."""
    made = Side(tmp_path)
    yield made
    made.slab.close()


def without(call: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Leave keys out."""
    return {key: value for key, value in call.items() if key not in keys}


def test_both_sides_agree_on_the_segment() -> None:
    """The receiver is another program: what they share is written down twice."""
    assert (receiving.HEAD_BYTES, receiving.PREFIX) == (slab.HEAD_BYTES, slab.PREFIX)


@pytest.mark.parametrize("layout", ["elements", "bytes"])
def test_later_calls_carry_metadata_alone(side: Side, layout: Layout) -> None:
    """P26: the buffer is registered once, and what was written since is what is loaded."""
    side.receive(side.call(1.0, layout=layout))
    side.receive(without(side.call(2.0, layout=layout), "buffer", "event"))
    assert side.loaded["w"].tolist() == [2.0] * 4
    assert side.slab.read == side.slab.written == 4


def test_an_omitted_buffer_after_a_clone_is_refused(side: Side) -> None:
    """P26: a clone sees no later write; LMDeploy's consumer loads the first bucket again without a word."""
    side.receive(side.call(1.0) | {"require_clone": True})
    with pytest.raises(BucketError, match="was a clone, which sees no later write"):
        side.receive(without(side.call(2.0), "buffer", "event"))


def test_the_default_is_a_clone(side: Side) -> None:
    """P26: a sender that says nothing of it is not taken to keep its buffer still."""
    side.receive(without(side.call(1.0), "require_clone"))
    with pytest.raises(BucketError, match="was a clone"):
        side.receive(without(side.call(2.0), "buffer", "event", "require_clone"))


def test_metadata_alone_on_the_first_call_is_refused(side: Side) -> None:
    """P26: nothing is registered."""
    with pytest.raises(BucketError, match="none is registered here"):
        side.receive(without(side.call(1.0), "buffer", "event"))


def test_metadata_alone_after_the_end_of_a_round_is_refused(side: Side) -> None:
    """P26: `finished` and sleep drop the buffer."""
    side.receive(side.call(1.0))
    side.receiver.drop()
    with pytest.raises(BucketError, match="none is registered here"):
        side.receive(without(side.call(2.0), "buffer", "event"))


def mappings(side: Side) -> int:
    """How often the segment is mapped in this process."""
    return Path("/proc/self/maps").read_text().count(side.slab.name)


def test_a_segment_stays_mapped_for_the_next_round(side: Side) -> None:
    """P26 P30: it is not registered meanwhile; the next round maps nothing anew, and reads what was written since."""
    sent = mappings(side)
    side.receive(side.call(1.0))
    side.receiver.end()
    assert not side.receiver.registered
    assert mappings(side) == sent + 1
    with pytest.raises(BucketError, match="none is registered here"):
        side.receive(without(side.call(2.0), "buffer", "event"))
    assert mappings(side) == sent, "after a refusal nothing is kept"
    for value in (3.0, 4.0):
        side.receive(side.call(value))
        side.receiver.end()
        assert side.loaded["w"].tolist() == [value] * 4
        assert mappings(side) == sent + 1


def test_another_segment_takes_the_place_of_the_one_that_was_mapped(side: Side, tmp_path: Path) -> None:
    """P26 P30: also under the name of the first; and one whose name is gone is not read any more."""
    side.receive(side.call(1.0))
    side.receiver.end()
    first, sent = side.slab, mappings(side) - 1
    side.slab = SharedSlab(256, tmp_path)
    side.receive(side.call(2.0))
    assert side.loaded["w"].tolist() == [2.0] * 4
    side.receiver.end()
    assert Path("/proc/self/maps").read_text().count(first.name) == sent
    call = side.call(3.0)
    (tmp_path / first.name).rename(tmp_path / side.slab.name)
    with pytest.raises(BucketError, match="the buffer is at 2, the call is about 4"):
        side.receive(call)
    side.slab.close()
    with pytest.raises(BucketError, match="cannot be mapped"):
        side.receive(call)


@pytest.mark.parametrize("event", [{"kind": "cuda_ipc", "handle": "00"}, {"kind": "sequence", "name": "other"}, 7])
def test_an_event_that_cannot_be_opened_is_an_error(side: Side, event: Any) -> None:
    """P26: not a skipped sync; the sender has to send without, and is told so."""
    with pytest.raises(EventError, match="only a sequence lock of the same segment"):
        side.receive(side.call(1.0) | {"event": event})
    assert side.loaded == {}


def test_a_buffer_that_is_kept_needs_an_event(side: Side) -> None:
    """P26: without one nobody could tell a torn bucket."""
    with pytest.raises(BucketError, match="event: needed with a buffer that is to be kept"):
        side.receive(without(side.call(1.0), "event"))
    side.receive(without(side.call(1.0), "event") | {"require_clone": True})
    assert side.loaded["w"].tolist() == [1.0] * 4


def test_a_dtype_switch_without_a_new_buffer_is_refused(side: Side) -> None:
    """P26: the old buffer would be reinterpreted; LMDeploy's consumer casts it in silence."""
    side.receive(side.call(1.0))
    with pytest.raises(BucketError, match=r"it is torch.bfloat16, the buffer was registered as torch.float32"):
        side.receive(without(side.call(2.0, torch.bfloat16), "buffer", "event"))
    side.receive(side.call(2.0, torch.bfloat16))
    assert side.loaded["w"].dtype is torch.bfloat16


def test_byte_indices_into_a_buffer_of_another_dtype_are_refused(side: Side) -> None:
    """P26: a round that goes from elements to bytes has to send its buffer anew."""
    side.receive(side.call(1.0))
    with pytest.raises(BucketError, match=r"byte indices need a buffer of uint8, not torch.float32"):
        side.receive(without(side.call(2.0, layout="bytes"), "buffer", "event"))


def test_metadata_past_the_buffer_are_refused(side: Side) -> None:
    """P26: what is not there is not loaded."""
    call = side.call(1.0)
    call["metadata"][0] |= {"start": 62, "end": 66}
    with pytest.raises(BucketError, match="ends at byte 264, the buffer has 256"):
        side.receive(call)


def test_a_failed_round_begins_anew_with_its_buffer(side: Side) -> None:
    """P26: after a refusal nothing is kept here, whatever the sender believes."""
    side.receive(side.call(1.0))
    with pytest.raises(BucketError, match="metadata"):
        side.receive({"metadata": [{}]})
    with pytest.raises(BucketError, match="none is registered here"):
        side.receive(without(side.call(2.0), "buffer", "event"))
    side.receive(side.call(3.0))
    assert side.loaded["w"].tolist() == [3.0] * 4


def test_a_bucket_that_was_overwritten_before_it_was_read_is_refused(side: Side) -> None:
    """P26: the call is about what was written when it was made."""
    call = side.call(1.0)
    side.call(2.0)
    with pytest.raises(BucketError, match="the buffer is at 4, the call is about 2"):
        side.receive(call)
    assert side.loaded == {}


def test_a_bucket_that_is_overwritten_while_it_is_read_is_refused(side: Side) -> None:
    """P26: a torn bucket is not taken for a whole one."""
    with pytest.raises(BucketError, match="from 2 to 4 while it was read"):
        side.receiver.receive(side.call(1.0), lambda _: side.call(2.0))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metadata": []}, "an empty bucket is for `finished` alone"),
        ({"metadata": None}, "expected a list"),
        ({"metadata": [{"name": "w"}]}, "no record of a tensor"),
        ({"layout": "bits"}, "expected 'elements' or 'bytes'"),
        ({"buffer": {"name": "../etc/passwd", "bytes": 4, "dtype": "uint8"}}, "no segment of a weight update"),
        ({"buffer": {"name": "rollout-svc-weights-/../x", "bytes": 4, "dtype": "uint8"}}, "no segment of a weight"),
        ({"buffer": {"name": "rollout-svc-weights-gone", "bytes": 4, "dtype": "uint8"}}, "event"),
        ({"buffer": {"name": "rollout-svc-weights-x", "bytes": -1, "dtype": "uint8"}}, "whole number from 0"),
        ({"buffer": {"name": "rollout-svc-weights-x", "bytes": 4, "dtype": "save"}}, "torch has none called 'save'"),
        ({"buffer": "x"}, "expected name, bytes and dtype"),
    ],
)
def test_what_means_nothing_is_refused(side: Side, change: dict[str, Any], told: str) -> None:
    """P35: one clear error, nothing loaded, nothing mapped that is not a segment of an update."""
    with pytest.raises(BucketError, match=told):
        side.receive(side.call(1.0) | change)
    assert side.loaded == {}
    assert not side.receiver.registered


@pytest.mark.parametrize("layout", ["elements", "bytes"])
@pytest.mark.parametrize(
    ("second", "told"),
    [({"name": "v"}, "places of their own: 'v'|'w' ends at"), ({"name": "w"}, "each name once, not 'w' twice")],
)
def test_metadata_that_contradict_each_other_are_refused(
    side: Side, second: dict[str, Any], told: str, layout: Layout
) -> None:
    """P26: two tensors at one place, or of one name, where a sender counted wrongly: nothing is loaded."""
    call = side.call(1.0, layout=layout)
    call["metadata"].append(call["metadata"][0] | second)
    with pytest.raises(BucketError, match=told):
        side.receive(call)
    assert side.loaded == {}


def test_a_closed_slab_has_no_name(tmp_path: Path) -> None:
    """P30: nothing is left in shared memory."""
    with SharedSlab(64, tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_slab(tmp_path: Path) -> None:
    """P30: a trainer that is killed leaves its buffer until another is made on its machine; a living one's stays."""
    left = tmp_path / f"{slab.PREFIX}1-0-{own_prefix('').split('-')[2]}-ab"
    left.touch()
    with SharedSlab(64, tmp_path) as living, SharedSlab(64, tmp_path) as other:
        assert {path.name for path in tmp_path.iterdir()} == {living.name, other.name}
