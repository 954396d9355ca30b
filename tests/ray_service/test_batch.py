"""A batch on its way: what is sent of it, what arrives, and when its loan is over."""

from __future__ import annotations

import pickle

import pytest

from rollout_svc.batches import Batch
from rollout_svc.errors import Conflict, SpentHandle
from rollout_svc.ledger import Ledger
from rollout_svc.ray.acks import Acks
from rollout_svc.ray.batch import Contents, TakenBatch, contents, pack
from rollout_svc.tensors import Handles
from tests.support.routed import ready_group


def leased(handles: Handles | None = None, *, routed: bool = False) -> Batch:
    """Make a batch of two groups."""
    ledger = Ledger()
    groups = tuple(ready_group(ledger, handles or Handles(), name, routed=routed) for name in ("g1", "g2"))
    return Batch("b0", 3, groups, {"aborted": 0})


def sent(taken: Contents, acks: Acks | None = None) -> TakenBatch:
    """Send a batch; returns what arrives."""
    packed = pack(taken, None if acks is None else acks.client, ["earlier"])
    arrived: TakenBatch = pickle.loads(pickle.dumps(packed))  # noqa: S301 - our own bytes
    return arrived


def test_what_arrives_is_the_record_of_the_contract() -> None:
    """P2: the batch is the one that the control API answers, and the handle it is of knows that it has it."""
    batch, acks = leased(), Acks()
    arrived = sent(contents(batch, 60.0, tensors=False), acks)
    assert arrived == batch.as_json()
    assert arrived.take_experts() == {}
    assert acks.unacked == ("b0",)
    assert acks.beside(3) == []
    acks.sent(acks.beside(4))
    with pytest.raises(SpentHandle, match="asked for after the ack of batch b0"):
        arrived.take_experts()


def test_a_lease_ends_by_itself() -> None:
    """P31: what is read once the lease is over says so; so does a copy that was passed on."""
    arrived = sent(contents(leased(), 0.0, tensors=False))
    with pytest.raises(SpentHandle, match="after the lease of batch b0 ended"):
        arrived.take_experts()
    again = pickle.loads(pickle.dumps(arrived))  # noqa: S301 - our own bytes
    assert again == arrived
    with pytest.raises(SpentHandle, match="after the lease of batch b0 ended"):
        again.take_experts()


def test_a_batch_that_was_given_up_meanwhile_is_not_sent() -> None:
    """P27: routed experts that went with an ack are a conflict, and never a batch without them."""
    handles = Handles()
    batch = leased(handles, routed=True)
    for group in batch.groups:
        for sample in group.samples:
            assert sample.experts is not None
            sample.experts.release("a test")
    with pytest.raises(Conflict, match="given up before it was sent"):
        contents(batch, 60.0, tensors=False)


def test_a_batch_of_tensors_has_its_routed_experts_in_it() -> None:
    """The same batch as padded tensors, made off the loop."""
    handles = Handles()
    arrived = sent(contents(leased(handles, routed=True), 60.0, tensors=True))
    assert arrived["batch_id"] == "b0"
    assert len(arrived["tensors"]["rewards"]) == 4
    assert "routed_experts" in arrived["tensors"]
