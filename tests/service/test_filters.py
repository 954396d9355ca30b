"""Filters in a running service: what is dropped is counted and gone, and nothing is dropped or kept by chance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import ConfigError, NotNow
from rollout_svc.events import GroupFinished, GroupsAllFiltered, GroupSettled, SampleFailed
from rollout_svc.filtering import GroupView
from rollout_svc.group import Group
from rollout_svc.producer.caution import LIMIT
from rollout_svc.producer.drought import FIRST
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import TASK, Stage, make_config, stage
from tests.support.stores import Store
from tests.support.virtual import soon

PAIRS = {"prompt_repeat_k": 2, "train_batch_size": 8}


def filtered(plugin: str, **options: Any) -> list[dict[str, Any]]:
    """The one task of a stage, with a filter."""
    return [
        {
            "name": TASK,
            "prompts": {"push": True},
            "judger": {"path": "tests.support.judges:Judge"},
            "sampling": {"max_tokens": 16},
            "filter": {"name" if plugin.isidentifier() else "path": plugin, **options},
        }
    ]


def of_support(kind: str, **options: Any) -> list[dict[str, Any]]:
    """The same, with a filter that the test holds in its hands."""
    return filtered(f"tests.support.filters:{kind}", **options)


def plugin_of(made: Stage) -> Any:
    """That filter."""
    desk = made.service.prepared.runtimes[TASK].filter
    assert desk is not None
    return desk._keep.__self__  # type: ignore[attr-defined]


class Ledgered(Store):
    """Also keeps what was settled, as it was when it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.settled_groups: list[tuple[Group, str]] = []

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Look at a group that ended."""
        assert_nothing_is_left(group)
        self.settled_groups.append((group, f"{group.account}:{group.reason}"))


def assert_nothing_is_left(group: Group) -> None:
    """P28: counts and reasons, and nothing of text, tokens, records and segments."""
    for sample in group.samples:
        assert (sample.packed, sample.segments, sample.response, sample.reward) == (None, [], None, None)
        assert (sample.prompt_ids, sample.response_ids, sample.logprobs, sample.reward_parts) == ([], [], [], {})
        assert (sample.meta, sample.weight_versions) == ({}, ())
        assert sample.reason


def answered(call: Call) -> Reply:
    return Reply(tokens=[call.prompt_ids[-1]] * 3)


def by_index(sample: Any) -> float:
    """Both samples of an even prompt get the same reward, those of an odd one do not."""
    first = sample.sample_id.endswith(".0")
    return 1.0 if sample.ground_truth % 2 == 0 or first else 0.0


async def test_groups_with_equal_rewards_are_dropped(engine: FakeSGLang) -> None:
    """`all_equal`, by its name: such groups are FILTERED with their reason, counted, and never in a batch."""  # P2
    store = Ledgered()
    async with stage(engine, tasks=filtered("all_equal"), trainer=PAIRS, storage=store) as made:
        made.judge.verdict = by_index
        await made.push(6)
        batch = await made.take(groups=3)
        await made.until(lambda: made.groups("filtered") == 3)
        assert sorted(group["prompt"]["id"] for group in batch["groups"]) == ["p1", "p3", "p5"]
        assert [ended for _, ended in store.settled_groups] == ["filtered:all_equal"] * 3
        assert sorted(store.saved) == sorted(group["group_id"] for group in batch["groups"])
        assert {event.reason for event in made.of(GroupSettled)} == {"all_equal"}
        assert made.samples("filtered") == 6
        assert all(sample.response_length == 3 for group, _ in store.settled_groups for sample in group.samples)


async def test_reward_figures_are_raw(engine: FakeSGLang) -> None:
    """What a filter drops counts in the reward figures of the next batch, once; per task as well."""
    async with stage(engine, tasks=filtered("all_equal"), trainer=PAIRS) as made:
        made.judge.verdict = by_index
        await made.push(_lines(0, 2, 4))
        await made.until(lambda: made.groups("filtered") == 3)
        await made.push(_lines(1))
        metrics = (await made.take(groups=1))["metrics"]
        assert (metrics["groups"], metrics["reward_samples"], metrics["reward_mean"]) == (1, 8, pytest.approx(7 / 8))
        assert metrics["reward_std"] == pytest.approx((7 / 8 * 1 / 8) ** 0.5)
        assert metrics["settled"] == {"filtered:all_equal": 3}
        assert metrics["tasks"][TASK]["reward_samples"] == 8
        await made.push(_lines(3))
        metrics = (await made.take(step=1, groups=1))["metrics"]
        assert (metrics["reward_samples"], metrics["reward_mean"], metrics["settled"]) == (2, 0.5, {})


def _lines(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": f"p{n}", "input_ids": [1, n], "ground_truth": n} for n in numbers]


async def test_an_expired_group_counts_in_the_figures(engine: FakeSGLang) -> None:
    """A finished group that is too old when it is asked for leaves no trace, and its rewards count."""  # P28
    store = Ledgered()
    async with stage(engine, pushed=2, storage=store) as made:
        await made.until(lambda: made.groups("ready") == 2)
        with pytest.raises(NotNow):
            await made.take(step=5, timeout_s=0.05)
        assert [ended for _, ended in store.settled_groups] == ["expired:stale"] * 2
        await made.push(1, first=2)
        metrics = (await made.take(step=1, groups=1))["metrics"]
        assert (metrics["groups"], metrics["reward_samples"], metrics["reward_mean"]) == (1, 3, 1.0)


async def test_a_failed_group_leaves_nothing(engine: FakeSGLang) -> None:
    """P28: a group that fails at its judge, with tokens in all its samples, is told and noted without them."""
    store = Ledgered()
    async with stage(engine, trainer=PAIRS, pushed=0, storage=store) as made:
        made.judge.verdict = lambda sample: ValueError("no idea") if sample.sample_id.endswith(".1") else 1.0
        await made.push(1)
        await made.until(lambda: made.groups("failed") == 1)
        [(group, ended)] = store.settled_groups
        assert ended == "failed:judge_error"
        assert [sample.reason for sample in group.samples] == ["sibling_failed", "judge_error"]


@pytest.mark.parametrize("kind", ["InlineFilter", "SyncFilter", "AsyncFilter"])
async def test_a_filter_that_fails_decides_nothing(engine: FakeSGLang, kind: str) -> None:
    """An error of the filter's is told, and the filter asked again; the last failure is the group's."""  # P2
    store = Ledgered()
    async with stage(engine, tasks=of_support(kind), trainer=PAIRS, storage=store) as made:
        plugin = plugin_of(made)
        plugin.verdict = lambda group: ValueError("no idea") if group.prompt_id == "p0" else None
        await made.push(2)
        batch = await made.take(groups=1)
        await made.until(lambda: made.groups("failed") == 1)
        assert batch["groups"][0]["prompt"]["id"] == "p1"
        assert [ended for _, ended in store.settled_groups] == ["failed:filter_failed"]
        failures = made.of(SampleFailed)
        assert [(event.reason, event.failures, event.final) for event in failures] == [
            ("filter_failed", 1, False),
            ("filter_failed", 2, False),
            ("filter_failed", 3, True),
        ]
        assert "no idea" in failures[0].message
        assert len(engine.requests) == 4, "nothing was generated again for a filter"
        metrics = (await made.take(step=0, groups=1))["metrics"]
        assert metrics["settled"] == batch["metrics"]["settled"]


async def test_a_filter_that_failed_once_is_asked_again(engine: FakeSGLang) -> None:
    """A filter that is itself again keeps the group: nothing is lost to a hiccup."""
    async with stage(engine, tasks=of_support("SyncFilter"), trainer=PAIRS) as made:
        plugin = plugin_of(made)
        plugin.verdict = lambda _: None if len(plugin.seen) > 1 else ValueError("a hiccup")
        await made.push(1)
        await made.take(groups=1)
        assert len(plugin.seen) == 2
        assert not made.groups("failed")


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_pause_takes_a_group_back_from_its_filter(engine: FakeSGLang, deaf: bool) -> None:
    """A filter that hangs holds up no pause: its group goes back whole, and is asked about again after resume."""  # P8
    store = Ledgered()
    tasks = of_support("AsyncFilter", timeout_s=600.0)
    async with stage(engine, tasks=tasks, trainer=PAIRS, storage=store) as made:
        plugin = plugin_of(made)
        plugin.bell = made.bell
        plugin.hold, plugin.deaf = True, deaf
        await made.push(1)
        await made.until(lambda: len(plugin.seen) == 1)
        report = await made.pause(deadline_s=0.4)
        assert report.clean is not deaf
        if deaf:
            assert [left.worker for left in report.abandoned] == [None]
        assert (made.groups("aborted"), made.samples("ready")) == (1, 2)
        plugin.verdict = lambda _: "late"
        plugin.release()
        await soon(20)
        assert made.groups("filtered") == 0, "what a filter says after it was cut counts for nothing"
        plugin.verdict = lambda _: None
        await made.resume()
        await made.take(groups=1)
        assert len(plugin.seen) == 2
        assert len(engine.requests) == 2


async def test_a_group_that_was_kept_is_not_asked_about_again(engine: FakeSGLang) -> None:
    """Cut while it is made durable, a group goes on at the storage: its filter was heard once."""
    store = Ledgered()
    async with stage(engine, tasks=of_support("InlineFilter"), trainer=PAIRS, storage=store) as made:
        plugin = plugin_of(made)
        store.block = True
        await made.push(1)
        await made.until(lambda: store.saving == 1)
        await made.pause(deadline_s=0.3)
        assert made.groups("aborted") == 1
        store.go_on.set()
        await made.resume()
        await made.take(groups=1)
        assert len(plugin.seen) == 1
        assert store.saving == 2


async def test_filtered_groups_make_room(engine: FakeSGLang) -> None:
    """A filter that drops nearly everything starves nobody: each group that goes lets another one in."""
    tasks = of_support("InlineFilter")
    async with stage(engine, tasks=tasks, trainer={"train_batch_size": 1, "prompt_repeat_k": 2}) as made:
        plugin_of(made).verdict = lambda group: None if group.prompt_id == "p19" else "dull"
        await made.push(20)
        batch = await made.take(groups=1)
        assert batch["groups"][0]["prompt"]["id"] == "p19"
        assert made.groups("filtered") == 19


async def test_a_filter_that_keeps_nothing_is_told(engine: FakeSGLang) -> None:
    """Where everything is filtered for long it is said, ever more seldom, in status, and to whoever waits."""  # P22
    async with stage(engine, tasks=of_support("InlineFilter"), trainer=PAIRS) as made:
        plugin = plugin_of(made)
        plugin.verdict = lambda _: "dull"
        await made.push(2 * FIRST + 1)
        await made.until(lambda: made.groups("filtered") == 2 * FIRST + 1)
        assert [event.in_a_row for event in made.of(GroupsAllFiltered)] == [FIRST, 2 * FIRST]
        assert made.service.status()["producer"]["filtered_in_a_row"] == {TASK: 2 * FIRST + 1}
        with pytest.raises(NotNow) as refused:
            await made.take(timeout_s=0.05)
        assert f"the last {2 * FIRST + 1} groups of task 't' were all filtered: dull" in refused.value.message
        plugin.verdict = lambda _: None
        await made.push(1, first=1000)
        await made.until(lambda: bool(made.of(GroupFinished)))
        assert made.service.status()["producer"]["filtered_in_a_row"] == {TASK: 0}


async def test_what_is_filtered_hides_no_failure(engine: FakeSGLang) -> None:
    """Where all that is not filtered fails, new prompts rest as if nothing had been filtered in between."""  # P18
    one = {"train_batch_size": 1, "prompt_repeat_k": 2}
    async with stage(engine, tasks=of_support("InlineFilter"), trainer=one) as made:
        plugin_of(made).verdict = lambda _: "dull"
        made.judge.verdict = lambda sample: ValueError("no") if sample.ground_truth % 2 else 0.5
        await made.push(100)
        await made.until(lambda: made.service.status()["producer"]["waiting_for"] == "every_group_fails")
        assert LIMIT <= made.groups("failed") <= LIMIT + 2
        assert made.groups("filtered") >= LIMIT - 1


async def test_the_end_of_the_prompts_is_told_with_numbers(engine: FakeSGLang, tmp_path: Any) -> None:
    """All prompts used and filtered: a take is told `exhausted` at once, with how many there were."""  # P22
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n{"input_ids": [3]}\n')
    tasks = of_support("InlineFilter")
    tasks[0]["prompts"] = {"jsonl": str(path), "epochs": 2}
    async with stage(engine, tasks=tasks, trainer=PAIRS, ready=False) as made:
        plugin_of(made).verdict = lambda _: "dull"
        await made.service.ready()
        async with asyncio.timeout(15):
            with pytest.raises(NotNow) as refused:
                await made.take(timeout_s=600.0)
        assert refused.value.type == "exhausted"
        assert "the prompts are used up, all 6, and 0 groups are left under way" in refused.value.message
        assert refused.value.detail["prompts_used"] == {TASK: 6}
        source = made.service.status()["producer"]["sources"][TASK]
        assert source == {"used": 6, "epoch": 2, "exhausted": True, "known_ids": None}


def view_of_nothing(group: GroupView) -> None:
    """A filter that is found by its path."""


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"name": "no_such"}, "tasks.0.filter.name"),
        ({"path": "tests.no_such:thing"}, "tasks.0.filter"),
        ({"path": "tests.support.stage:PROMPT"}, "tasks.0.filter"),
        ({"name": "all_equal", "tolerance": -1.0}, "tasks.0.filter"),
        ({"name": "all_equal", "typo": 1}, "tasks.0.filter.typo"),
        ({"path": "tests.service.test_filters:view_of_nothing", "option": 1}, "tasks.0.filter"),
        ({"name": "all_equal", "timeout_s": 0.0}, "tasks.0.filter.timeout_s"),
    ],
)
def test_a_wrong_filter_is_refused_at_its_path(given: dict[str, Any], path: str) -> None:
    """P35: nothing is started with a filter that cannot be found, made or called."""
    from rollout_svc.assembly import prepare

    tasks = filtered("all_equal")
    tasks[0]["filter"] = given
    with pytest.raises(ConfigError) as refused:
        prepare(make_config(tasks=tasks))
    assert [problem.path for problem in refused.value.problems] == [path]
