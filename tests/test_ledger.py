"""The ledger: both equations hold after every call, and settled is for good."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.errors import LedgerImbalance
from rollout_svc.ledger import ACCOUNTS, SETTLED, Account, Ledger

accounts = st.sampled_from(ACCOUNTS)
moves = st.tuples(st.booleans(), accounts, accounts, st.integers(1, 3))


@given(st.lists(st.integers(1, 4) | moves, max_size=60))
def test_it_balances_after_any_calls(calls: list[int | tuple[bool, Account, Account, int]]) -> None:
    """However it is called, it says what a plain count of the same calls says, and both sums hold."""  # P1
    ledger = Ledger()
    model = {unit: dict.fromkeys(("admitted", *ACCOUNTS), 0) for unit in ("groups", "samples")}
    for call in calls:
        if isinstance(call, int):
            ledger.admit(call)
            for unit, number in (("groups", 1), ("samples", call)):
                model[unit]["admitted"] += number
                model[unit]["queued"] += number
        else:
            _move(ledger, model, *call)
        ledger.check()
        told = ledger.as_json()
        assert {unit: told[unit] for unit in model} == model
        for counts in model.values():
            assert counts["admitted"] == sum(counts[name] for name in ACCOUNTS)
        settled = sum(model["groups"][name] for name in SETTLED)
        assert ledger.unsettled_groups == model["groups"]["admitted"] - settled


def _move(
    ledger: Ledger, model: dict[str, dict[str, int]], group: bool, source: Account, target: Account, number: int
) -> None:
    counts = model["groups" if group else "samples"]
    number = 1 if group else number

    def move() -> None:
        if group:
            ledger.move_group(source, target)
        else:
            ledger.move_samples(source, target, number)

    if source == target:
        move()  # from an account to itself is no move
    elif source in SETTLED or counts[source] < number:
        with pytest.raises(LedgerImbalance):
            move()
    else:
        move()
        counts[source] -= number
        counts[target] += number


@pytest.mark.parametrize("settled", sorted(SETTLED))
def test_nothing_leaves_a_settled_account(settled: Account) -> None:
    """What is consumed, filtered, expired or failed stays so."""  # P1
    ledger = Ledger()
    ledger.admit(1)
    ledger.move_group("queued", settled)
    with pytest.raises(LedgerImbalance, match="for good"):
        ledger.move_group(settled, "queued")
    assert ledger.groups(settled) == 1


def test_the_record_has_exactly_the_keys_of_the_contract() -> None:
    """Readers of the record find these keys and no other."""
    record = Ledger().as_json()
    assert set(record) == {"groups", "samples", "late_discarded", "redone"}
    keys = {"admitted", "queued", "in_flight", "aborted", "ready", "leased", "consumed", "filtered", "expired"}
    assert set(record["groups"]) == set(record["samples"]) == keys | {"failed"}


def test_check_finds_an_imbalance() -> None:
    """A book whose sum is wrong, or below zero, is a bug that is told, not data."""
    ledger = Ledger()
    ledger.admit(2)
    ledger._samples.counts["ready"] += 1
    with pytest.raises(LedgerImbalance, match="samples"):
        ledger.check()
    ledger._samples.counts["queued"] = -1
    ledger._samples.counts["ready"] = 3
    with pytest.raises(LedgerImbalance, match="samples"):
        ledger.check()


@given(st.lists(st.tuples(st.sampled_from("ab"), accounts, accounts), max_size=40))
def test_the_accounts_of_the_tasks_add_up_to_all(calls: list[tuple[str, Account, Account]]) -> None:
    """Each group is counted once for its task, and a task cannot lose a group that it does not have."""  # P1 P33
    ledger = Ledger()
    for task in "ab":
        ledger.admit(2, task)
    for task, source, target in calls:
        held = ledger.task(task).counts[source]
        if source != target and (source in SETTLED or not held):
            before = ledger.as_json()["groups"]
            with pytest.raises(LedgerImbalance):
                ledger.move_group(source, target, task)
            assert ledger.as_json()["groups"] == before
        else:
            ledger.move_group(source, target, task)
        for account in ACCOUNTS:
            assert ledger.groups(account) == sum(ledger.task(name).counts[account] for name in "ab")
