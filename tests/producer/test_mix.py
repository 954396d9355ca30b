"""The mix: by the weights over any number of batches, nobody starved, and no batch that waits for nobody."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.producer.mix import Supply, carried, most_behind, needs, quotas, waits_for

weights = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1)
carries = st.dictionaries(st.sampled_from("abcdefg"), st.floats(-8, 8))
supplies = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(
        lambda weight, ready, under_way, room, present: Supply(
            weight, ready, ready + under_way, under_way + room, present or ready + under_way > 0
        ),
        st.floats(0.1, 10),
        *[st.integers(0, 9)] * 3,
        st.booleans(),
    ),
    min_size=1,
)


@given(st.integers(0, 40), weights, carries)
def test_quotas_add_up(groups: int, shares: dict[str, float], carry: dict[str, float]) -> None:
    """Whatever was owed, a batch is divided among those who take part, and none gets less than nothing."""  # P33
    given_ = quotas(groups, shares, carry)
    assert set(given_) == set(shares)
    assert sum(given_.values()) == groups
    assert min(given_.values()) >= 0


@settings(deadline=None)
@given(weights, st.lists(st.integers(1, 9), max_size=60))
def test_what_is_handed_over_follows_the_weights(shares: dict[str, float], batches: list[int]) -> None:
    """After any number of batches of any sizes each task is within a group or so of its share."""  # P33
    carry: dict[str, float] = {}
    had, total = dict.fromkeys(shares, 0), 0
    plenty = {task: Supply(weight, 1000, 1000, 0) for task, weight in shares.items()}
    for groups in batches:
        taken = needs(groups, plenty, carry)
        carry = carried(groups, plenty, carry, taken)
        total += groups
        for task, count in taken.items():
            had[task] += count
        for task, weight in shares.items():
            assert abs(had[task] - total * weight / sum(shares.values())) < 1.5


@given(st.integers(1, 40), supplies, carries)
def test_a_batch_waits_only_for_those_who_can_come(
    groups: int, there: dict[str, Supply], carry: dict[str, float]
) -> None:
    """Whoever is waited for can bring what is missing; if nobody is, the batch is there or can never be."""  # P33
    needed, missing = needs(groups, there, carry), waits_for(groups, there, carry)
    for task, count in missing.items():
        assert 0 < count <= there[task].coming
    most = sum(supply.ready + supply.coming for supply in there.values() if supply.present)
    assert sum(needed.values()) == min(groups, most)
    if not missing:
        assert sum(min(count, there[task].ready) for task, count in needed.items()) == min(groups, most)


@given(st.integers(1, 40), supplies, carries)
def test_the_prompt_that_is_needed_first_is_of_a_task_that_is_waited_for(
    groups: int, there: dict[str, Supply], carry: dict[str, float]
) -> None:
    """Where a task lacks groups for the next batch it is admitted before all that do not."""  # P33
    able = [task for task, supply in there.items() if supply.coming > supply.out - supply.ready]
    task = most_behind(groups, there, carry, able)
    assert (task is None) == (not able)
    needed = needs(groups, there, carry)
    lacking = [name for name in able if there[name].out < needed.get(name, 0)]
    assert task is None or not lacking or task in lacking


def test_what_the_next_batch_lacks_goes_before_what_later_ones_will() -> None:
    """2.5 : 0.8 : 1.7 of five: `a` has its two, and would be the first by its weight alone; `b` has none of its one."""
    there = {"a": Supply(3.0, 2, 2, 1), "b": Supply(1.0, 0, 0, 2), "c": Supply(2.0, 3, 4, 3)}
    assert needs(5, there, {}) == {"a": 2, "b": 1, "c": 2}
    assert most_behind(5, there, {}, ["a", "b", "c"]) == "b"
    assert most_behind(0, there, {}, ["a", "b", "c"]) == "a"


def test_a_debt_is_a_batch_at_most() -> None:
    """A task that could not come is owed its share of one batch, and then less: the others are not crowded out."""
    away = {"a": Supply(1.0, 99, 99, 0), "b": Supply(3.0, 0, 0, 0, present=True)}
    carry: dict[str, float] = {}
    for _ in range(20):
        taken = needs(8, away, carry)
        assert taken == {"a": 8, "b": 0}
        carry = carried(8, away, carry, taken)
    assert carry["b"] == 6.0
    back = {"a": Supply(1.0, 99, 99, 0), "b": Supply(3.0, 99, 99, 0)}
    shares = []
    for _ in range(4):
        taken = needs(8, back, carry)
        carry = carried(8, back, carry, taken)
        shares.append(taken["b"])
    assert shares == [8, 7, 6, 6]


def test_who_had_no_prompts_is_owed_nothing() -> None:
    """A task without prompts takes no part: the others are mixed among themselves, and it begins where it was."""
    there = {"a": Supply(1.0, 9, 9, 0), "b": Supply(1.0, 0, 0, 0, present=False)}
    taken = needs(4, there, {"b": 0.5})
    assert taken == {"a": 4}
    assert carried(4, there, {"b": 0.5, "a": -0.5}, taken)["b"] == 0.5


# -- histories -----------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What happens to the groups of one task."""

    weight: float
    prompts: float = float("inf")
    limit: float = float("inf")
    turns: int = 1
    """Turns that a group takes."""
    lost: float = 0.0
    """Part of its groups that fail, are filtered or expire."""
    ready: int = 0
    leased: int = 0
    running: list[int] = field(default_factory=list)
    consumed: int = 0


class House:
    """A stage of counts alone: one group is admitted or one batch taken at a time, and turns pass."""

    def __init__(self, tasks: dict[str, Task], *, most: int, slots: int, rng: Random) -> None:
        self.tasks, self.most, self.slots, self.rng = tasks, most, slots, rng
        self.carry: dict[str, float] = {}
        self.turn = 0

    @property
    def room(self) -> int:
        return self.most - sum(task.ready + task.leased + len(task.running) for task in self.tasks.values())

    def able(self) -> list[str]:
        return [
            name
            for name, task in self.tasks.items()
            if task.prompts > 0 and task.ready + task.leased + len(task.running) < task.limit
        ]

    def supplies(self) -> dict[str, Supply]:
        able, room = self.able(), self.room
        told = {}
        for name, task in self.tasks.items():
            own = min(room, task.limit - task.ready - task.leased - len(task.running)) if name in able else 0
            out = task.ready + len(task.running)
            coming = len(task.running) + int(max(0, own))
            told[name] = Supply(task.weight, task.ready, out, coming, out > 0 or task.prompts > 0)
        return told

    def admit(self, groups: int) -> None:
        while self.room > 0 and sum(len(task.running) for task in self.tasks.values()) < self.slots:
            name = most_behind(groups, self.supplies(), self.carry, self.able())
            if name is None:
                return
            task = self.tasks[name]
            task.prompts -= 1
            task.running.append(self.turn + max(1, round(self.rng.expovariate(1 / task.turns))))

    def pass_turn(self) -> None:
        self.turn += 1
        for task in self.tasks.values():
            ended = sum(end <= self.turn for end in task.running)
            task.running = [end for end in task.running if end > self.turn]
            task.ready += sum(self.rng.random() >= task.lost for _ in range(ended))

    def take(self, groups: int) -> dict[str, int] | None:
        there = self.supplies()
        if waits_for(groups, there, self.carry):
            return None
        taken = needs(groups, there, self.carry)
        if sum(taken.values()) < groups:
            return None
        self.carry = carried(groups, there, self.carry, taken)
        for name, count in taken.items():
            task = self.tasks[name]
            assert task.ready >= count
            task.ready, task.leased = task.ready - count, task.leased + count
        return taken

    def ack(self) -> None:
        for task in self.tasks.values():
            task.consumed, task.leased = task.consumed + task.leased, 0


houses = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        Task,
        weight=st.floats(0.1, 10),
        prompts=st.integers(0, 60) | st.just(float("inf")),
        limit=st.integers(1, 12) | st.just(float("inf")),
        turns=st.sampled_from([1, 3, 10]),
        lost=st.sampled_from([0.0, 0.5, 0.9]),
    ),
    min_size=1,
)


@settings(deadline=None)
@given(houses, st.integers(1, 8), st.integers(0, 12), st.integers(1, 8), st.integers(0, 9999))
def test_no_batch_waits_for_ever(tasks: dict[str, Task], groups: int, spare: int, slots: int, seed: int) -> None:
    """Until prompts or the tasks' own limits end it the next batch comes: who is waited for comes, or fails."""  # P33
    house = House(tasks, most=groups + spare, slots=slots, rng=Random(seed))
    for _ in range(12):
        for _ in range(2000):
            house.admit(groups)
            if house.take(groups) is not None:
                break
            busy = any(task.running for task in tasks.values())
            can_start = house.room > 0 and bool(house.able())
            if not busy and not can_start:
                most = sum(task.ready for task in tasks.values())
                assert most < groups, f"{most} are ready, {groups} asked for, and nothing moves"
                return  # exhausted, or at the limits of the tasks: there are not so many
            house.pass_turn()
        else:
            pytest.fail("a batch never came")
        house.ack()


def test_slow_failing_and_filtered_tasks_keep_their_shares() -> None:
    """5:3:1, one ten times slower, one loses half, one most: within a group of the ideal every 10 batches."""  # P33
    for seed in range(20):
        tasks = {
            "slow": Task(5.0, turns=30),
            "fails": Task(3.0, turns=3, lost=0.5),
            "filtered": Task(1.0, turns=3, lost=0.8),
        }
        house = House(tasks, most=32, slots=24, rng=Random(seed))
        before = dict.fromkeys(tasks, 0)
        for batch in range(1, 61):
            while house.take(16) is None:
                house.admit(16)
                house.pass_turn()
            house.ack()
            if batch % 10 == 0:
                for name, task in tasks.items():
                    ideal = 160 * task.weight / 9
                    assert abs(task.consumed - before[name] - ideal) <= 1.0
                    before[name] = task.consumed


def test_a_task_that_rarely_has_a_prompt_gets_the_next_turn() -> None:
    """Whenever it has one it is admitted: it has fewer groups out than its share of what comes."""  # P33
    out = {"fast": 0, "slow": 0}
    for step in range(100):
        there = ["fast", "slow"] if step % 10 == 9 else ["fast"]
        supplied = {name: Supply(1.0, count, count, 1) for name, count in out.items()}
        task = most_behind(0, supplied, {}, there)
        assert task == ("slow" if step % 10 == 9 else "fast")
        out[task] += 1


def test_a_task_that_returns_does_not_crowd_out_the_others() -> None:
    """What it never had is not made up for: it is admitted by its share of what is out, from then on."""  # P33
    out = {"new": 0, "old": 6}
    admitted = []
    for _ in range(14):
        task = most_behind(8, {name: Supply(1.0, n, n, 9) for name, n in out.items()}, {}, ["new", "old"])
        assert task is not None
        out[task] += 1
        admitted.append(task)
    assert out == {"new": 10, "old": 10}
