"""The tail: what expires or is cut again and again goes first, finishes, and holds up nobody."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.config import Strategy, TrainerConfig
from rollout_svc.group import Group
from rollout_svc.producer.schedule import Counts
from rollout_svc.producer.tail import Tail
from tests.producer.model import Model
from tests.support.groups import make_group


def gathered(tail: Tail, count: int) -> list[Group]:
    """Gather groups that were cut."""
    groups = [make_group(group_id=f"g{number}", size=1) for number in range(count)]
    for group in groups:
        tail.keep(group)
    return groups


# -- the pool ------------------------------------------------------------------------------------------------


def test_without_a_size_nothing_is_gathered() -> None:
    """Off, an expired group is for good, and a cut one goes on in its turn."""
    tail, group = Tail(None, 1), make_group()
    group.cuts = 9
    assert not tail.wants(group)
    assert not tail.again(group)
    assert not tail.prompts()


def test_a_group_belongs_here_after_so_many_cuts() -> None:
    """One cut less than asked for, and it goes on in the ordinary queue."""
    tail, group = Tail(2, 3), make_group()
    group.cuts = 2
    assert not tail.wants(group)
    group.cuts = 3
    assert tail.wants(group)


def test_a_round_takes_as_many_as_were_waited_for_groups_first() -> None:
    """It begins with all groups, fills up with prompts, and what is left over waits for the next."""
    tail = Tail(3, 1)
    for number in range(3):
        assert tail.again(make_group(group_id=f"e{number}"))
    groups = gathered(tail, 2)
    tail.begin()
    assert (tail.groups(), len(tail.prompts())) == (groups, 3)
    assert (tail.counts.left, tail.counts.gathered, tail.counts.gathered_groups) == (3, 2, 0)
    assert tail.counts.kept


def test_a_round_is_over_when_its_last_group_is() -> None:
    """Started or not, finished or settled: until then it is on, no other begins, and nothing is set aside."""
    tail = Tail(2, 1)
    one, two = gathered(tail, 2)
    tail.begin()
    tail.started(one)
    assert not tail.ended(one.group_id)
    tail.started(two)
    two.cuts = 5
    assert not tail.wants(two)
    gathered(tail, 2)
    tail.begin()
    assert tail.counts.left == 0
    assert not tail.ended("a stranger")
    assert tail.ended(two.group_id)
    assert not tail.counts.on
    assert tail.counts.ripe


def test_a_group_that_expires_while_it_waits_is_let_go() -> None:
    """Gathered or left of a round, it is gone at once, and its prompt may be gathered again."""
    tail = Tail(2, 1)
    one, two = gathered(tail, 2)
    tail.begin()
    tail.drop(one)
    tail.again(one)
    assert tail.groups() == [two]
    assert (tail.waiting_groups, tail.waiting_prompts) == (1, 1)


# -- followed ------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn, tail: bool | None = None) -> Model:
    """Draw settings that are not refused."""
    interval = draw(st.integers(1, 2))
    batch = draw(st.integers(1, 4))
    trainer = TrainerConfig(
        train_batch_size=batch,
        prompt_repeat_k=1,
        over_sample_threshold=draw(st.sampled_from((0.0, 0.5, 1.0))),
        max_staleness=draw(st.integers(interval - 1, 3)),
        update_interval=interval,
    )
    on = draw(st.booleans()) if tail is None else tail
    pool = Tail(draw(st.integers(1, batch)) if on else None, draw(st.integers(1, 3)))
    prompts = draw(st.sampled_from((10**6, 10**6, 40)))
    return Model(draw(st.sampled_from(get_args(Strategy))), trainer, pool, prompts)


@settings(deadline=None)
@given(models(), st.data())
def test_every_take_in_reach_is_met(model: Model, data: st.DataObject) -> None:
    """Whatever ends, fails, is cut or is asked for: a take that waits has something running, and is met."""  # P18

    def within(now: Counts) -> None:
        limit = model.rule.limit(now.demand)
        assert now.out + 1 <= (min(limit, model.rule.needed(now.demand)) if now.tail.on else limit)

    model.on_admission = within
    for _ in range(data.draw(st.integers(1, 6))):
        for move in data.draw(st.lists(st.sampled_from(("finish", "fail", "pause", "produce")), max_size=8)):
            model.produce()
            if move == "pause":
                model.pause(model.version)
            elif model.running and move != "produce":
                group = data.draw(st.sampled_from(model.running))
                (model.finish if move == "finish" else model.fail)(group)
        if model.prompts < 30:
            return  # not enough may be left; what is, is looked at below
        model.waiting = data.draw(st.integers(1, model.rule.max_groups))
        model.batch(lambda running: data.draw(st.sampled_from(running)))
        if data.draw(st.booleans()):
            model.produce()
        model.train()
        model.ledger.check()


@settings(deadline=None)
@given(models(), st.integers(1, 8), st.data())
def test_no_prompt_is_lost(model: Model, batches: int, data: st.DataObject) -> None:
    """Each prompt is consumed, under way or in the tail, once; without a tail it may be EXPIRED for good."""  # P1
    consumed: list[str] = []
    model.prompts = 10**6
    for _ in range(batches):
        consumed += model.batch(lambda running: data.draw(st.sampled_from(running)))
        model.produce()
        model.train()
    found = Counter([*consumed, *model.waiting_prompts()])
    if model.tail.size is None:
        found += Counter(model.expired)
    assert found == Counter(f"p{number}" for number in range(model.used))


def batches_until_trained(model: Model, long: str, most: int) -> int | None:
    """Batches until one has this prompt, where its group runs for as long as anything else does."""
    for number in range(1, most + 1):
        taken = model.batch(lambda running: min(running, key=lambda group: group.prompt.prompt_id == long))
        if long in taken:
            return number
        model.produce()
        model.train()
    return None


@pytest.mark.parametrize("strategy", ["async", "disaggregated"])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_cut_again_and_again_does_finish(strategy: Strategy, bound: int, size: int) -> None:
    """What takes longer than anything else is cut at every update; in its round the next batch waits for it."""  # P32
    trainer = TrainerConfig(train_batch_size=4, prompt_repeat_k=1, over_sample_threshold=0.5, max_staleness=bound)
    assert batches_until_trained(Model(strategy, trainer, Tail(size, 1)), "p0", 12) is not None
    without = Model(strategy, trainer, Tail(None, 1))
    if batches_until_trained(without, "p0", 12) is None:
        assert "p0" in without.expired


def test_a_full_house_whose_rest_waits_here_begins_a_round() -> None:
    """Nothing more can be admitted, and the batch needs what has gathered: it goes, be it less than a round."""
    trainer = TrainerConfig(train_batch_size=4, prompt_repeat_k=1, over_sample_threshold=0.0, max_staleness=0)
    model = Model("async", trainer, Tail(4, 1))
    model.produce()
    for group in model.running[:2]:
        model.finish(group)
    model.pause(0)
    assert sorted(model.batch(lambda running: running[0])) == ["p0", "p1", "p2", "p3"]


def test_a_round_waits_for_no_company_at_the_end_of_the_prompts() -> None:
    """With nothing else to admit what has gathered goes at once, be it less than a round."""
    trainer = TrainerConfig(train_batch_size=2, prompt_repeat_k=1, over_sample_threshold=0.5, max_staleness=1)
    model = Model("async", trainer, Tail(2, 1), prompts=3)
    model.produce()
    model.pause(0)
    assert [group.cuts for group in model.buffer.unfinished_groups()] == [1, 1, 1]
    model.prompts = 0
    taken = model.batch(lambda running: running[0])
    model.waiting = 1
    taken += model.batch(lambda running: running[0])
    assert sorted(taken) == ["p0", "p1", "p2"]
