"""Restarts: a budget in a window, a back-off that doubles, and the ports that go with them."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.launching import LaunchFailed, Restarts, choose_port
from rollout_svc.launching.policy import BASE_S, CAP_S, UNPROVED_RESTARTS
from rollout_svc.launching.ports import AUTO_PORTS

LIVES = st.lists(st.floats(0.0, 500.0), max_size=60)
"""Seconds a process lived, one after the other."""


def story(budget: int, window_s: float, lives: list[float], *, proved: bool = True, seed: int = 0) -> list[float]:
    """The moments of all restarts of a command whose processes live that long."""
    restarts, now, moments = Restarts(budget, window_s, Random(seed)), 0.0, []
    for lived in lives:
        now += lived
        wait_s = restarts.ended(now, proved=proved)
        if wait_s is None:
            break
        now += wait_s
        moments.append(now)
    return moments


@given(st.integers(0, 8), st.floats(1.0, 1000.0), LIVES, st.integers(0, 9))
def test_no_window_holds_more_restarts_than_the_budget(
    budget: int, window_s: float, lives: list[float], seed: int
) -> None:
    """However its processes end, a command is started again at most `restarts` times in any `restart_window_s`."""
    moments = story(budget, window_s, lives, seed=seed)
    for moment in moments:
        assert sum(moment <= other < moment + window_s for other in moments) <= budget


@given(st.integers(1, 30), LIVES, st.integers(0, 9))
def test_the_back_off_doubles_up_to_its_cap(budget: int, lives: list[float], seed: int) -> None:
    """The n-th restart in the window waits half to all of BASE_S * 2**n, never more than CAP_S."""
    restarts, now = Restarts(budget, 1e9, Random(seed)), 0.0
    for number, lived in enumerate(lives[:budget]):
        now += lived
        wait_s = restarts.ended(now, proved=True)
        full = min(CAP_S, BASE_S * 2**number)
        assert wait_s is not None
        assert full / 2 <= wait_s <= full


@given(st.integers(0, 8), LIVES)
def test_a_command_that_never_answered_is_tried_twice(budget: int, lives: list[float]) -> None:
    """Wrong flags are wrong every time: the budget is for what has worked."""
    assert len(story(budget, 1e9, lives, proved=False)) <= min(budget, UNPROVED_RESTARTS)


def test_what_fell_out_of_the_window_is_forgotten() -> None:
    """A command that ends once a window is started again for ever, and without a longer and longer wait."""
    restarts = Restarts(1, 100.0, Random(0))
    for now in range(0, 10_000, 150):
        wait_s = restarts.ended(float(now), proved=True)
        assert wait_s is not None
        assert wait_s <= BASE_S
        assert restarts.used == 1
    assert restarts.ended(9_901.0, proved=True) is None


@given(st.sets(st.sampled_from(AUTO_PORTS), max_size=50), st.integers(0, 99))
def test_a_chosen_port_is_free_and_nobody_elses(taken: set[int], seed: int) -> None:
    """A port comes from the range, is free, and belongs to no other worker even where that one is down just now."""
    asked: list[int] = []

    def is_free(port: int) -> bool:
        asked.append(port)
        return port % 2 == 0

    port = choose_port(None, taken, is_free, Random(seed))
    assert port in AUTO_PORTS
    assert port not in taken
    assert port % 2 == 0
    assert not taken & set(asked)


def test_a_port_is_kept_where_it_is_still_free() -> None:
    """A restarted engine is found where it was, or else somewhere new."""
    assert choose_port(4711, {1}, lambda _: True, Random(0)) == 4711
    assert choose_port(4711, {1}, lambda port: port != 4711, Random(0)) in AUTO_PORTS
    with pytest.raises(LaunchFailed, match="no free port"):
        choose_port(4711, {1}, lambda _: False, Random(0))


def test_two_commands_do_not_restart_in_step() -> None:
    """Jitter: what a full machine killed together does not come back together."""
    one, two = (Restarts(5, 60.0, Random(seed)) for seed in (1, 2))
    waits = [(one.ended(now, proved=True), two.ended(now, proved=True)) for now in (0.0, 100.0)]
    assert all(a != b for a, b in waits)
    assert all(a != b for a, b in pairwise(waits))
