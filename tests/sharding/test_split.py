"""Settings divided: nothing is lost on the way, and no limit is exceeded by the sum."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_svc.config import Config, TrainerConfig
from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError
from rollout_svc.plan import make_plan
from rollout_svc.producer.schedule import Demand, make_rule
from rollout_svc.sharding.split import apportion, deal, shard_for, shard_trainers, split

sizes = st.lists(st.integers(1, 512), min_size=1, max_size=12)


def whole(shards: int, batches: list[int | None], **sections: Any) -> dict[str, Any]:
    """A configuration with shards, an engine for each of `batches`."""
    workers = [{"url": f"http://engine-{n}", "max_batch": batch} for n, batch in enumerate(batches)]
    return {
        "cluster": "ray",
        "workers": workers,
        "tasks": [{"name": "t", "prompts": {"push": True}}],
        "producer": {"shards": shards},
        "buffer": {"path": "/data/journal"},
        **sections,
    }


@given(sizes, st.integers(1, 12))
def test_every_worker_is_one_shards(capacities: list[int], count: int) -> None:
    """Each is dealt once, every shard has one, and no shard has more than it would with the smallest worker gone."""
    assume(count <= len(capacities))
    hands = deal(capacities, count)
    assert sorted(place for hand in hands for place in hand) == list(range(len(capacities)))
    assert all(hands)
    held = [sum(capacities[place] for place in hand) for hand in hands]
    for hand, has in zip(hands, held, strict=True):
        assert len(hand) == 1 or has - min(capacities[place] for place in hand) <= min(held)


@given(st.integers(0, 10_000), sizes, st.integers(0, 3))
def test_a_number_is_divided_whole(total: int, weights: list[int], least: int) -> None:
    """The shares add up to it; each is its quota up to one, unless it is raised to the least."""
    shares = apportion(total, weights, least)
    assert sum(shares) == total
    if total >= least * len(weights):
        assert min(shares) >= least
    quotas = [Fraction(total * weight, sum(weights)) for weight in weights]
    if min(quotas) >= least:
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))


@given(
    st.integers(1, 600),
    st.decimals(0, 100, places=3).map(float),
    st.integers(0, 4),
    sizes,
    st.sampled_from(["async", "sync", "disaggregated"]),
)
def test_the_budget_is_that_of_the_whole(
    batch: int, over: float, staleness: int, capacities: list[int], strategy: Any
) -> None:
    """Over all shards: groups of a batch, beyond it, admitted and not consumed, and out at once, are the whole's."""
    assume(len(capacities) <= batch)
    trainer = TrainerConfig(
        train_batch_size=batch, prompt_repeat_k=1, over_sample_threshold=over, max_staleness=staleness
    )
    parts = shard_trainers(trainer, capacities)
    bound = ceil(batch * (1 + Fraction(repr(over)))) * (1 + staleness)
    plans = [make_plan(part, [size]) for part, size in zip(parts, capacities, strict=True)]
    assert sum(plan.max_groups for plan in plans) == bound
    assert sum(part.train_batch_size for part in parts) == batch
    demand = Demand(0, 0)
    rules = [make_rule(strategy, part, required=1, max_groups=1) for part in parts]
    one = make_rule(strategy, trainer, required=1, max_groups=1)
    assert sum(rule.budget for rule in rules) == one.budget
    if strategy != "async" or staleness == 0:
        assert sum(rule.limit(demand) for rule in rules) == one.limit(demand)
    else:
        assert sum(rule.limit(demand) for rule in rules) <= one.limit(demand)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 64))
def test_each_worker_is_asked_for_as_much_as_before(shards: int, each: int, groups: int) -> None:
    """Of workers alike, dealt out evenly, none is asked for more than the whole's plan asks, up to a group."""
    batch = groups * shards
    config = config_from_mapping(
        whole(shards, [64] * (shards * each), trainer={"train_batch_size": batch, "over_sample_threshold": 0.5})
    )
    before = make_plan(config.trainer, [64] * (shards * each))
    for part in split(config):
        plan = make_plan(part.config.trainer, [worker.max_batch for worker in part.config.workers])
        assert abs(plan.required - before.required) <= config.trainer.prompt_repeat_k


def test_each_shard_has_what_is_its_own() -> None:
    """Files, ports and limits are divided; all else is as it was, and no shard has shards."""
    config = config_from_mapping(
        whole(
            2,
            [32, 64, 32],
            trainer={"train_batch_size": 4},
            service={"port": 8700, "public_url": "http://here"},
            buffer={"path": "/data/journal", "max_bytes": 1001},
            trajectories={"path": "/data/told.jsonl"},
            judges={"processes": 1},
            evaluation={"max_in_flight": 8},
            sessions={"max": 6},
            producer={"shards": 2, "tail_batch_size": 2},
            tasks=[
                {
                    "name": "t",
                    "prompts": {"push": True},
                    "max_groups": 9,
                    "judger": {"name": "exact", "concurrency": 3, "requests_per_minute": 90.0},
                }
            ],
        )
    )
    first, second = split(config)
    assert [(part.shard_id, str(part.portion), part.workers) for part in (first, second)] == [
        ("s0", "0 of 2", (1,)),
        ("s1", "1 of 2", (0, 2)),
    ]
    assert [worker.url for worker in second.config.workers] == ["http://engine-0", "http://engine-2"]
    one, two = first.config, second.config
    assert (one.service.port, one.service.public_url, one.producer.shards) == (0, None, 1)
    assert (one.buffer.path, two.buffer.path) == ("/data/journal.s0", "/data/journal.s1")
    assert (one.trajectories.path, two.trajectories.path) == ("/data/told.jsonl.s0", "/data/told.jsonl.s1")
    assert (one.buffer.max_bytes, two.buffer.max_bytes) == (500, 500)
    assert (one.judges.processes, two.judges.processes) == (1, 1)
    assert (one.evaluation.max_in_flight, two.sessions.max) == (4, 3)
    assert (one.producer.tail_batch_size, two.producer.tail_batch_size) == (1, 1)
    assert one.tasks[0].max_groups == 5
    assert two.tasks[0].max_groups == 4
    assert [part.tasks[0].judger.concurrency for part in (one, two)] == [2, 1]
    assert [part.tasks[0].judger.requests_per_minute for part in (one, two)] == [45.0, 45.0]
    assert one.pause == config.pause
    # P1: an ack that was accepted finds its part there, however long the shard was away: its coordinator ends leases.
    assert one.buffer.lease_s >= 365 * 86_400
    assert Config.model_validate(one.model_dump()) == one, "a shard's settings are valid ones"


def test_a_later_worker_goes_where_capacity_is_short() -> None:
    """Of shards that are alike the first; else the one with the least for each group of its batch."""
    assert shard_for([64, 64], [4, 4]) == 0
    assert shard_for([128, 64], [4, 4]) == 1
    assert shard_for([128, 64], [8, 2]) == 0


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"cluster": None}, "producer.shards", "cluster: ray"),
        ({"buffer": {}}, "buffer.path", "required with 2 shards"),
        ({"workers": [{"url": "http://one"}]}, "producer.shards", "of 1 workers"),
        ({"trainer": {"train_batch_size": 1}}, "producer.shards", "batches of 1 groups"),
        (
            {"tasks": [{"name": "t", "prompts": {"push": True}, "max_groups": 1}]},
            "tasks.0.max_groups",
            "cannot be divided",
        ),
        (
            {"tasks": [{"name": "t", "prompts": {"push": True}, "judger": {"name": "exact", "concurrency": 1}}]},
            "tasks.0.judger.concurrency",
            "cannot be divided",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], path: str, words: str) -> None:
    """One line at the setting that stands in the way."""  # P35
    with pytest.raises(ConfigError) as told:
        config_from_mapping(whole(2, [8, 8]) | changes)
    [problem] = told.value.problems
    assert problem.path == path
    assert words in problem.message
