"""Settings that cannot work together: refused at the one to change, with the numbers; what works is let through."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.config import ProducerConfig, PromptsConfig, Strategy, TaskConfig, TrainerConfig
from rollout_svc.feasible import infeasible, partials_usable, remarks

PUSH = PromptsConfig(push=True)


def problems(
    trainer: dict[str, Any] | None = None, producer: dict[str, Any] | None = None, *tasks: dict[str, Any]
) -> dict[str, str]:
    """What is refused, by path."""
    made = [TaskConfig(name=f"t{index}", prompts=PUSH, **task) for index, task in enumerate(tasks or ({},))]
    found = infeasible(TrainerConfig(**trainer or {}), ProducerConfig(**producer or {}), made)
    return {problem.path: problem.message for problem in found}


def test_the_defaults_work() -> None:
    """Nothing stands in the way of a configuration that says nothing."""
    assert problems() == {}


@pytest.mark.parametrize(("interval", "bound", "works"), [(1, 0, True), (2, 0, False), (2, 1, True), (5, 3, False)])
def test_the_last_step_before_an_update_has_to_be_served(interval: int, bound: int, works: bool) -> None:
    """It is `update_interval - 1` behind its weights, and a group may be as much."""  # P32
    found = problems({"update_interval": interval, "max_staleness": bound})
    assert list(found) == ([] if works else ["trainer.max_staleness"])
    if not works:
        assert f"update_interval {interval}" in found["trainer.max_staleness"]
        assert f"at least {interval - 1}" in found["trainer.max_staleness"]


@pytest.mark.parametrize(
    ("tokens", "bound", "interval", "said"),
    [(2, 1, 1, "max_staleness 1"), (1, 1, 1, ""), (0, 1, 2, "at least 1"), (1, 1, 2, "")],
)
def test_the_bound_on_tokens_lies_within_that_on_groups(tokens: int, bound: int, interval: int, said: str) -> None:
    """Above it nothing is ever masked, and below the interval nothing is left of the last step's tokens."""  # P32
    found = problems({"max_token_staleness": tokens, "max_staleness": bound, "update_interval": interval})
    assert list(found) == (["trainer.max_token_staleness"] if said else [])
    assert said in found.get("trainer.max_token_staleness", "")


@pytest.mark.parametrize("strategy", ["async", "disaggregated"])
def test_partials_that_always_expire_are_refused_where_asked_for(strategy: Strategy) -> None:
    """At staleness 0 an update leaves every cut token behind: asked for it is refused, else off, and said."""  # P32
    zero = {"max_staleness": 0}
    found = problems(zero, {"strategy": strategy}, {}, {"partial_rollout": True})
    assert list(found) == ["tasks.1.partial_rollout"]
    assert "v + 1" in found["tasks.1.partial_rollout"]
    assert problems(zero, {"strategy": strategy}, {"partial_rollout": False}, {}) == {}
    tasks = [TaskConfig(name=name, prompts=PUSH, partial_rollout=on) for name, on in (("a", None), ("b", False))]
    [said] = remarks(TrainerConfig(**zero), strategy, tasks)
    assert "samples of a are" in said


def test_nothing_is_cut_by_an_update_under_sync() -> None:
    """So partials are of use there at any staleness, and nothing is said."""
    zero = TrainerConfig(max_staleness=0)
    assert partials_usable(zero, "sync")
    assert not partials_usable(zero, "async")
    assert problems({"max_staleness": 0}, {"strategy": "sync"}, {"partial_rollout": True}) == {}
    assert remarks(zero, "sync", [TaskConfig(name="a", prompts=PUSH)]) == ()


def test_the_tail_fits_in_a_batch() -> None:
    """Its round is what one batch needs; what is set for a tail that is off would be ignored."""
    assert list(problems({"train_batch_size": 4}, {"tail_batch_size": 5})) == ["producer.tail_batch_size"]
    assert problems({"train_batch_size": 4}, {"tail_batch_size": 4, "tail_after_aborts": 1}) == {}
    assert list(problems(None, {"tail_after_aborts": 1})) == ["producer.tail_after_aborts"]


def test_the_limits_of_the_tasks_leave_room_for_a_batch() -> None:
    """All limited to less than a batch together, none is ever filled; one without a limit fills it."""
    trainer = {"train_batch_size": 8}
    found = problems(trainer, None, {"max_groups": 3}, {"max_groups": 4})
    assert "3 + 4 = 7" in found["tasks.0.max_groups"]
    assert problems(trainer, None, {"max_groups": 3}, {"max_groups": 5}) == {}
    assert problems(trainer, None, {"max_groups": 3}, {}) == {}
