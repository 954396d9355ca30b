"""The concurrency plan: the inequalities it promises, and the numbers it gives."""

import dataclasses
import resource
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import TrainerConfig
from rollout_svc.errors import ConfigError
from rollout_svc.limits import raise_open_file_limit
from rollout_svc.plan import MAX_REQUESTS_PER_WORKER, Plan, check_open_files, make_plan

hundredths = st.integers(0, 300).map(lambda n: n / 100)
trainers = st.builds(
    TrainerConfig,
    train_batch_size=st.integers(1, 1024),
    prompt_repeat_k=st.integers(1, 64),
    over_sample_threshold=hundredths,
    max_batch_per_worker=st.integers(1, 1024),
    allow_over_concurrency_ratio=hundredths.map(lambda ratio: ratio + 0.5),
    max_staleness=st.integers(0, 8),
)
fleets = st.lists(st.none() | st.integers(1, 2048), min_size=1, max_size=24)


def exact(number: float) -> Fraction:
    return Fraction(repr(number))


@given(trainers, fleets)
def test_required_is_the_share_of_one_worker(trainer: TrainerConfig, fleet: list[int | None]) -> None:
    """`required` is the least whole number whose multiple by the workers covers the over-sampled batch."""
    plan = make_plan(trainer, fleet)
    wanted = trainer.train_batch_size * trainer.prompt_repeat_k * (1 + exact(trainer.over_sample_threshold))
    assert plan.workers == len(fleet)
    assert plan.required * len(fleet) >= wanted
    assert (plan.required - 1) * len(fleet) < wanted


@given(trainers, fleets)
def test_no_worker_is_asked_for_more_than_it_is_allowed(trainer: TrainerConfig, fleet: list[int | None]) -> None:
    """Every limit is the settings' own, or exactly what is required where that was not enough, with a warning."""
    plan = make_plan(trainer, fleet)
    raised = False
    for index, batch in enumerate(fleet):
        size = trainer.max_batch_per_worker if batch is None else batch
        by_settings = ceil(size * exact(trainer.allow_over_concurrency_ratio))
        assert plan.limit_of(str(index)) == max(by_settings, plan.required)
        raised = raised or by_settings < plan.required
    assert plan.allowed == min(plan.limits.values()) >= plan.required
    assert raised == bool(plan.warnings) == (plan.ratio > trainer.allow_over_concurrency_ratio)
    assert raised or plan.ratio == trainer.allow_over_concurrency_ratio


@given(trainers, st.integers(1, 24))
def test_the_ratio_in_force_gives_the_limit_in_force(trainer: TrainerConfig, workers: int) -> None:
    """In a fleet of equals `allowed` is `ceil(max_batch * ratio)`, with the ratio as shown, raised or not."""
    plan = make_plan(trainer, [None] * workers)
    assert plan.allowed == ceil(trainer.max_batch_per_worker * exact(plan.ratio))


@given(trainers, fleets)
def test_groups_are_bounded(trainer: TrainerConfig, fleet: list[int | None]) -> None:
    """`max_groups` is the over-sampled batch, once per step of staleness and once more."""
    plan = make_plan(trainer, fleet)
    batch = ceil(trainer.train_batch_size * (1 + exact(trainer.over_sample_threshold)))
    assert plan.max_groups == batch * (1 + trainer.max_staleness)


@given(trainers)
def test_no_workers_is_plan_0(trainer: TrainerConfig) -> None:
    """Without workers nothing is required and nothing allowed, and the plan says that it waits."""
    plan = make_plan(trainer, {})
    assert (plan.workers, plan.required, plan.allowed) == (0, 0, 0)
    assert plan.limit_of("any") == 0
    assert "no workers" in plan.warnings[0]


@pytest.mark.parametrize(
    ("settings", "fleet", "shown"),
    [
        ({}, [None] * 8, {"workers": 8, "required": 77, "allowed": 77, "ratio": 1.2, "max_groups": 154}),
        ({}, [None] * 10, {"workers": 10, "required": 62, "allowed": 77, "ratio": 1.2, "max_groups": 154}),
        (
            {"train_batch_size": 10, "prompt_repeat_k": 1, "over_sample_threshold": 0.1, "max_staleness": 0},
            [100],
            {"workers": 1, "required": 11, "allowed": 120, "ratio": 1.2, "max_groups": 11},
        ),
        (
            {"allow_over_concurrency_ratio": 1.1, "train_batch_size": 1},
            [100],
            {"workers": 1, "required": 10, "allowed": 110, "ratio": 1.1, "max_groups": 4},
        ),
    ],
)
def test_known_plans(settings: dict[str, Any], fleet: list[int | None], shown: dict[str, Any]) -> None:
    """The numbers, worked out by hand; fractions are taken as written: 100 * 1.1 is 110."""
    assert make_plan(TrainerConfig(**settings), fleet).as_json() == {**shown, "warnings": []}


def test_a_raised_ratio_is_announced_with_both_numbers() -> None:
    """The ratio is never raised in silence: the warning gives what was allowed and what is required."""
    plan = make_plan(TrainerConfig(), [None] * 4)
    assert (plan.required, plan.allowed, plan.ratio) == (154, 154, 2.4)
    (warning,) = plan.warnings
    assert warning.startswith("77 requests allowed per worker, 154 required: ")
    assert warning.endswith("allow_over_concurrency_ratio raised from 1.2 to 2.4 (4 of 4 workers)")


def test_workers_differ() -> None:
    """A large worker keeps its own limit; a small one is raised to what is required; `allowed` is the smallest."""
    plan = make_plan(TrainerConfig(), {"large": 256, "small": 16, "usual": None})
    assert plan.required == 205
    assert [plan.limit_of(name) for name in ("large", "small", "usual")] == [308, 205, 205]
    assert plan.allowed == 205
    assert ceil(16 * exact(plan.ratio)) == 205
    assert "2 of 3 workers" in plan.warnings[0]


def test_limits_by_hand_hold() -> None:
    """A limit set by hand holds even below what is required, and the plan warns with both numbers."""
    plan = make_plan(TrainerConfig(), {"a": None, "b": None}, {"a": 5})
    assert plan.limit_of("a") == plan.allowed == 5
    assert plan.limit_of("b") == plan.required == 308
    assert plan.warnings[1] == "worker a: limit set to 5 requests, 308 required"


def test_limits_that_make_no_sense_are_refused() -> None:
    """P35: a limit for a worker that is not there, or below 1, is a problem at its path."""
    with pytest.raises(ConfigError) as raised:
        make_plan(TrainerConfig(), {"a": None}, {"a": 0, "b": 3})
    assert [problem.path for problem in raised.value.problems] == ["limits.a", "limits.b"]
    with pytest.raises(ConfigError, match=r"workers\.a\.max_batch"):
        make_plan(TrainerConfig(), {"a": 0})


def test_an_impossible_plan_is_refused() -> None:
    """P35: numbers no fleet can serve are refused at the dotted path, with the numbers."""
    trainer = TrainerConfig(train_batch_size=100_000, prompt_repeat_k=100)
    with pytest.raises(ConfigError, match=rf"^trainer\.train_batch_size: .*12000000.*{MAX_REQUESTS_PER_WORKER}"):
        make_plan(trainer, [None])
    assert make_plan(trainer, [None] * 16).required == 750_000


def test_a_plan_does_not_change() -> None:
    """A plan is a value, and its JSON has exactly the keys of the control API."""
    plan = make_plan(TrainerConfig(), [None])
    assert list(plan.as_json()) == ["workers", "required", "allowed", "ratio", "max_groups", "warnings"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.required = 3  # type: ignore[misc]


@given(trainers, fleets, st.integers(-1, 100_000), st.integers(-1, 100_000))
def test_open_files_suffice_or_the_plan_is_refused(
    trainer: TrainerConfig, fleet: list[int | None], soft: int, hard: int
) -> None:
    """P35: a plan that starts has a file for each request it allows; the limit is never lowered."""
    plan = make_plan(trainer, fleet)
    requests = sum(plan.limits.values())
    try:
        limit = check_open_files(plan, soft, hard)
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.path == "trainer"
        assert str(hard) in problem.message
        assert 0 <= hard < requests + 1000
        return
    assert limit == soft or limit > soft >= 0
    assert limit < 0 or limit > requests
    assert limit == soft or hard < 0 or limit <= hard


def test_the_soft_limit_is_raised_to_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's limit is raised when the plan needs it, left alone otherwise, refused beyond the hard limit."""
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append((kind, limits)))
    assert raise_open_file_limit(Plan(1, 10, 10, 1.2, 10, limits={"a": 10})) == 1024
    assert calls == []
    assert raise_open_file_limit(Plan(1, 10, 2000, 1.2, 10, limits={"a": 2000})) == 2260
    assert calls == [(resource.RLIMIT_NOFILE, (2260, 4096))]
    with pytest.raises(ConfigError, match="hard limit is 4096"):
        raise_open_file_limit(Plan(1, 10, 5000, 1.2, 10, limits={"a": 5000}))
