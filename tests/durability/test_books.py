"""The books bite: whatever a service might get wrong over a crash is found by them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.durability.books import Books, BrokenPromiseError

LEASE_S = 10.0


def books(passes: int = 1) -> Books:
    """Books of two lines, `a` and `b`, in groups of one."""
    return Books({"a": [1, 2], "b": [3]}, passes, 1, LEASE_S)


def batch(step: int, batch_id: str, *groups: tuple[str, str], ids: list[int] | None = None) -> dict[str, Any]:
    """An answered take; groups are `(group_id, prompt_id)`."""
    answers = {"a": [1, 2], "b": [3], "p": [4]}

    def sample(group_id: str, prompt_id: str) -> dict[str, Any]:
        tokens = answers[prompt_id] if ids is None else ids
        named = {"sample_id": f"{group_id}.0", "status": "COMPLETED", "reward": 1.0}
        return named | {"response_ids": tokens, "logprobs": [0.0] * len(tokens)}

    told = [{"group_id": g, "prompt": {"id": p}, "samples": [sample(g, p)]} for g, p in groups]
    return {"step": step, "batch_id": batch_id, "groups": told}


def ledger(consumed: int, **also: int) -> dict[str, Any]:
    """A ledger that balances, unless `admitted` is given."""
    book = {"consumed": consumed, "filtered": 0, "expired": 0, "failed": 0} | also
    return {unit: {"admitted": sum(book.values()), **book} for unit in ("groups", "samples")}


def test_a_life_without_fault_closes() -> None:
    """Each prompt is taken, acknowledged and counted once; the same step shows the same batch."""
    kept = books()
    kept.took(batch(0, "b0", ("g0", "a")), 0.0, 0.0)
    kept.took(batch(0, "b0", ("g0", "a")), 1.0, 1.0)
    kept.acked("b0")
    kept.took(batch(1, "b1", ("g1", "b")), 2.0, 2.0)
    assert (kept.left, kept.lendable) == (1, 0)
    kept.acked("b1")
    kept.audit(ledger(2))
    assert (kept.left, kept.batches) == (0, 2)


@pytest.mark.parametrize(
    "shown",
    [
        batch(1, "b1", ("g0", "a")),  # P31: acknowledged, and here again
        batch(1, "b1", ("g9", "a")),  # its prompt once more, as another group
        batch(1, "b1", ("g1", "p")),  # nobody gave it
        batch(1, "b1", ("g1", "b"), ids=[3, 3]),  # a prefix that was doubled
        batch(1, "b1", ("g1", "b"), ids=[]),  # tokens that were lost
    ],
)
def test_a_batch_that_cannot_be_is_found(shown: dict[str, Any]) -> None:
    """What was acknowledged, was never given, or has other tokens than it must have breaks the books."""
    kept = books()
    kept.took(batch(0, "b0", ("g0", "a")), 0.0, 0.0)
    kept.acked("b0")
    with pytest.raises(BrokenPromiseError):
        kept.took(shown, 1.0, 1.0)


def test_a_lease_holds_until_its_end() -> None:
    """A lent group comes in no other batch, and its step gives no other batch, before the lease can have ended."""
    kept = books()
    kept.took(batch(0, "b0", ("g0", "a")), 0.0, 1.0)
    for other in (batch(1, "b1", ("g0", "a")), batch(0, "b1", ("g0", "a")), batch(0, "b0", ("g1", "b"))):
        with pytest.raises(BrokenPromiseError):
            kept.copy().took(other, 9.0, 9.9)
    with pytest.raises(BrokenPromiseError):
        kept.refused("b0", 9.9)
    kept.took(batch(1, "b1", ("g0", "a")), 9.0, 10.0)
    assert list(kept.lent) == [1]


def test_a_push_that_was_answered_is_due_once() -> None:
    """A push is counted from its answer on; one that was not answered may come, once, and may have been new or not."""
    kept = books()
    kept.push({"p": [4]})
    assert kept.left == 2
    kept.took(batch(0, "b0", ("g0", "p")), 0.0, 0.0)
    with pytest.raises(BrokenPromiseError):
        kept.copy().took(batch(1, "b1", ("g1", "p")), 0.0, 0.0)
    kept.pushed(["p"], 0)
    assert kept.left == 3
    with pytest.raises(BrokenPromiseError):
        kept.pushed(["p"], 1)  # it was new twice


def test_going_back_makes_later_steps_due_again() -> None:
    """What was consumed at a step or later is to come again; what was consumed before is not."""
    kept = books()
    for step, prompt_id in enumerate("ab"):
        kept.took(batch(step, f"b{step}", (f"g{step}", prompt_id)), 0.0, 0.0)
        kept.acked(f"b{step}")
    before = kept.copy()
    kept.go_back(1)
    assert (kept.left, before.left) == (1, 0)
    kept.audit(ledger(1))
    kept.took(batch(1, "b9", ("g9", "b")), 0.0, 0.0)
    with pytest.raises(BrokenPromiseError):
        kept.took(batch(2, "b10", ("g10", "a")), 0.0, 0.0)


@pytest.mark.parametrize("wrong", [ledger(0), ledger(2), ledger(1, failed=1), ledger(1, admitted=2)])
def test_a_ledger_that_says_otherwise_is_found(wrong: dict[str, Any]) -> None:
    """Another count of what is consumed, anything lost, or an equation that does not hold breaks the books."""
    kept = books()
    kept.took(batch(0, "b0", ("g0", "a")), 0.0, 0.0)
    kept.acked("b0")
    kept.audit(ledger(1))
    with pytest.raises(BrokenPromiseError):
        kept.audit(wrong)
