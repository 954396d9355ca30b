"""Sharded histories by seed: a short run of them, and that they replay."""

from __future__ import annotations

from tests.simulation.campaign import outcomes
from tests.simulation.sharded.history import run_sharded

_SEEDS = range(12)


def test_every_promise_holds_on_every_sharded_history() -> None:  # P1 P2 P3 P8 P9 P10 P11 P22 P24 P31 P32
    """No history of a short run breaks a promise, and together they are big enough to mean something."""
    pauses = met = 0
    for outcome in outcomes(_SEEDS, adversarial=False, digest=False, jobs=1, run=run_sharded):
        assert outcome.broken is None, f"seed {outcome.seed}: {outcome.broken}"
        assert outcome.admitted >= 8
        pauses, met = pauses + outcome.pauses, met + outcome.met.total()
    assert pauses > 5 * len(_SEEDS)
    assert met > 5 * len(_SEEDS)


def test_a_sharded_seed_is_one_history() -> None:
    """The same seed tells the same, to the last digit, with shuffled wake-ups as well."""
    for adversarial in (False, True):
        first, second = (run_sharded(5, adversarial=adversarial, digest=True) for _ in range(2))
        assert first.digest == second.digest
