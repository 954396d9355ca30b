"""What a handle acknowledges by itself: each batch that arrived, with a later take, and never its own step's."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.ray.acks import Acks, acks_of


class Lent:
    """A batch that says what ended it."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, by: str) -> None:
        """Take note of it."""
        self.ended.append(by)


def test_a_batch_is_acknowledged_with_the_next_take_that_is_answered() -> None:
    """P31: a take that failed loses no acknowledgement; one that was answered brings it no second time."""
    acks, lent = Acks(), Lent()
    assert acks.beside(0) == []
    acks.received("b0", 0, lent)
    assert acks.beside(0) == []  # the same step again asks for the batch once more
    assert acks.beside(1) == ["b0"]
    acks.sent(["b0"])
    assert lent.ended == ["the ack of batch b0"]
    assert acks.beside(1) == ["b0"]
    acks.answered(["b0"])
    assert acks.beside(1) == []


def test_batches_that_were_asked_for_in_advance_are_all_acknowledged() -> None:
    """P1: two takes that were under way at once leave no batch behind to be handed out a second time."""
    acks = Acks()
    lent = [Lent(), Lent()]
    acks.received("b0", 0, lent[0])
    acks.received("b1", 1, lent[1])
    assert acks.beside(2) == ["b0", "b1"]
    assert acks.before(1) == ["b0"]


def test_a_handle_that_went_is_not_known() -> None:
    """P30: handles that come and go leave nothing."""
    acks = Acks()
    client = acks.client
    assert acks_of(client) is acks
    assert acks_of(None) is None
    del acks
    gc.collect()
    assert acks_of(client) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_every_batch_is_acknowledged_once_it_can_be(takes: list[tuple[int, bool]]) -> None:
    """P1: of any takes, answered or lost, what is left unacknowledged is of the last step alone, once one arrives."""
    acks, held = Acks(), []
    leased: dict[int, str] = {}
    consumed: set[str] = set()
    for number, (step, arrives) in enumerate(takes):
        sent = acks.beside(step)
        assert all(leased.get(step) != batch_id for batch_id in sent)
        acks.sent(sent)
        consumed |= set(sent)  # the service hears it, whether or not its answer arrives
        leased = {at: batch_id for at, batch_id in leased.items() if batch_id not in consumed}
        batch_id = leased.setdefault(step, f"b{number}")
        if arrives:
            held.append(Lent())
            acks.answered(sent)
            acks.received(batch_id, step, held[-1])
            assert acks.unacked == (batch_id,)
