"""Staleness: exact, and unknown where a version is unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.producer.staleness import refusal, staleness
from tests.support.groups import completed, make_group, segment

versions = st.lists(st.integers(0, 20), max_size=5)


def of_versions(*wanted: int | None) -> Group:
    """Make a group whose one sample has a token of each version."""
    group = make_group(size=1)
    group.start()
    sample = group.samples[0]
    attempt = sample.hand_out()
    for version in wanted:
        sample.extend(attempt, segment([1], version))
    return group


@given(versions, st.integers(0, 20))
def test_it_is_that_of_the_oldest_token(known: list[int], step: int) -> None:
    """The staleness of a group is `step` less its oldest version; without tokens it is 0."""  # P32
    assert staleness(known, step) == (step - min(known) if known else 0)


@given(versions, st.integers(0, 20), st.integers(0, 5))
def test_one_unknown_version_makes_it_unknown(known: list[int], step: int, at: int) -> None:
    """Nobody vouches for tokens whose version the engine did not report: never handed over under a bound."""  # P32
    mixed: list[int | None] = [*known[:at], None, *known[at:]]
    assert staleness(mixed, step) is None
    assert refusal(of_versions(*mixed), step, max_staleness=100) == "version_unknown"


@given(versions, st.integers(0, 20), st.integers(0, 8))
def test_a_group_is_refused_exactly_beyond_the_bound(known: list[int], step: int, bound: int) -> None:
    """At the bound it is handed over, one step beyond it is not."""  # P32
    group = of_versions(*known)
    expected = "stale" if any(step - version > bound for version in known) else None
    assert refusal(group, step, bound) == expected


@pytest.mark.parametrize(("step", "bound", "reason"), [(3, 0, None), (4, 0, "stale"), (4, 1, None), (2, 0, None)])
def test_on_policy_is_staleness_zero(step: int, bound: int, reason: str | None) -> None:
    """Tokens of version 3 are on-policy for step 3; ones from the future are never too old."""
    assert refusal(completed(Ledger(), "g", version=3), step, bound) == reason
