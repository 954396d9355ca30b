"""Batches: leased, acknowledged once, given back by time, never stale, and never waited for in vain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotFound, NotNow
from rollout_svc.events import ComponentDied, GroupSettled, LeaseExpired, SampleFailed
from tests.support.answers import ids
from tests.support.answers import its_number as answered
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.sources import BAD_LINES
from tests.support.stage import lines, stage
from tests.support.stores import Store


async def test_the_same_step_gives_the_same_batch(engine: FakeSGLang) -> None:
    """While it is leased, asking for its step again gives the batch again, whatever else is ready."""
    async with stage(engine, pushed=4) as made:
        first = await made.take(step=0, groups=2)
        again = await made.take(step=0, groups=2)
        other = await made.take(step=1, groups=2)
        assert again == first
        assert other["batch_id"] != first["batch_id"]
        assert not set(ids(first)) & set(ids(other))
        assert made.groups("leased") == 4


async def test_two_takes_of_one_step_at_once_get_one_batch(engine: FakeSGLang) -> None:
    """A trainer that asks twice at the same time is lent one batch."""
    async with stage(engine) as made:
        asking = [made.start(made.take(step=0, groups=2)) for _ in range(2)]
        await made.push(4)
        one, two = await asyncio.gather(*asking)
        assert one["batch_id"] == two["batch_id"]
        assert made.groups("leased") == 2


async def test_a_batch_that_is_acknowledged_while_it_is_asked_for_again_is_not_given_again(engine: FakeSGLang) -> None:
    """Somebody acknowledges it while the take waits for the disk: the take gets the next one."""  # P31
    store = Store()
    async with stage(engine, pushed=4, storage=store) as made:
        first = await made.take(step=0, groups=2)
        store.flushing = asyncio.Event()
        again = made.start(made.take(step=0, groups=2))
        await store.flushing.wait()
        acked = made.start(made.service.ack(first["batch_id"]))
        await made.until(lambda: made.groups("consumed") == 2)
        store.go_on.set()
        await acked
        assert not set(ids(await again)) & set(ids(first))


async def test_an_ack_is_for_good_and_twice_is_once(engine: FakeSGLang) -> None:
    """Consumed groups never come back; a second ack says the same; an unknown batch is 404."""  # P1
    async with stage(engine, pushed=4) as made:
        batch = await made.take(groups=2)
        await made.service.ack(batch["batch_id"])
        await made.service.ack(batch["batch_id"])
        assert made.groups("consumed") == 2
        again = await made.take(step=0, groups=2)
        assert not set(ids(again)) & set(ids(batch))
        with pytest.raises(NotFound):
            await made.service.ack("no-such-batch")


async def test_the_next_take_acks_the_batch_before(engine: FakeSGLang) -> None:
    """`ack` in a take consumes first; ids it cannot honour come back in `ack_expired`."""
    async with stage(engine, pushed=8, trainer={"max_staleness": 2}) as made:
        first = await made.take(step=0, groups=2)
        second = await made.take(step=1, groups=2, ack=[first["batch_id"]])
        assert made.groups("consumed") == 2
        assert "ack_expired" not in second
        third = await made.take(step=2, groups=2, ack=["gone", second["batch_id"]])
        assert third["ack_expired"] == ["gone"]
        assert made.groups("consumed") == 4


async def test_a_lease_that_ends_gives_its_groups_back_in_front(engine: FakeSGLang) -> None:
    """A late ack is 409; the groups are ready again, first in line, and handed out under a new batch."""
    async with stage(engine, pushed=4, buffer={"lease_s": 0.15}) as made:
        await made.until(lambda: made.groups("ready") == 4)
        batch = await made.take(step=0, groups=2)
        await made.until(lambda: bool(made.of(LeaseExpired)))
        assert (made.groups("ready"), made.groups("leased")) == (4, 0)
        with pytest.raises(Conflict) as refused:
            await made.service.ack(batch["batch_id"])
        assert refused.value.type == "lease_expired"
        again = await made.take(step=0, groups=2, ack=[batch["batch_id"]])
        assert again["batch_id"] != batch["batch_id"]
        assert again["ack_expired"] == [batch["batch_id"]]
        assert sorted(ids(again)) == sorted(ids(batch))
        await made.service.ack(again["batch_id"])
        assert made.groups("consumed") == 2


async def test_what_comes_back_is_checked_for_its_age_again(engine: FakeSGLang) -> None:
    """Groups of an expired lease that have become too old are EXPIRED at the next take."""  # P32
    async with stage(engine, pushed=2, buffer={"lease_s": 0.1}, trainer={"max_staleness": 0}) as made:
        await made.take(step=0, groups=2)
        await made.until(lambda: bool(made.of(LeaseExpired)))
        with pytest.raises(NotNow):
            await made.take(step=1, groups=2, timeout_s=0.01)
        assert (made.groups("expired"), made.samples("expired")) == (2, 2)


async def test_a_group_beyond_the_bound_is_never_handed_over(tmp_path: Path, engine: FakeSGLang) -> None:
    """Staleness is `step - version`, the group's largest; at the bound it counts, beyond it expires."""  # P32
    async with stage(engine, pushed=2, trainer={"train_batch_size": 2, "max_staleness": 2}) as made:
        await made.until(lambda: made.groups("ready") == 2)
        at_bound = await made.take(step=2, groups=1)
        assert at_bound["metrics"]["staleness"] == {"2": 1}
        with pytest.raises(NotNow) as refused:
            await made.take(step=3, groups=1, timeout_s=0.0)
        assert refused.value.type == "not_enough"
        assert made.groups("expired") == 1
        await made.pause()
        await made.service.update_weights(3, {"kind": "disk", "path": str(tmp_path)})
        await made.resume()
        await made.push(1, first=10)
        fresh = await made.take(step=3, groups=1)
        assert (ids(fresh), fresh["metrics"]["staleness"]) == (["p10"], {"0": 1})
        assert fresh["metrics"]["settled"] == {"expired:stale": 1}


async def test_a_version_nobody_knows_is_not_batched(engine: FakeSGLang) -> None:
    """Tokens under a null version expire as such where staleness is bounded."""  # P7 P32
    engine.answer = lambda _: Reply(tokens=1, weight_versions=[{"version": "beta", "start": 0, "end": 1}])
    async with stage(engine, pushed=1) as made:
        await made.until(lambda: made.groups("ready") + made.groups("aborted") == 1)
        with pytest.raises(NotNow):
            await made.take(timeout_s=0.0)
        assert made.groups("ready") == 0


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ({"step": -1}, "step"),
        ({"step": "1"}, "step"),
        ({"step": True}, "step"),
        ({"step": 1.0}, "step"),
        ({"groups": 0}, "groups"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
async def test_a_take_that_means_nothing_is_refused(engine: FakeSGLang, how: dict[str, Any], path: str) -> None:
    """In process as over HTTP: named, nothing is lent, and the service goes on."""
    async with stage(engine, pushed=1) as made:
        await made.until(lambda: made.groups("ready") == 1)
        with pytest.raises(BadRequest, match=f"^{path}: "):
            await made.service.take_batch(**{"step": 0, "groups": 1, "timeout_s": 1.0} | how)
        assert made.groups("leased") == 0
        assert ids(await made.take(step=0, groups=1)) == ["p0"]


async def test_a_take_that_is_short_says_why() -> None:
    """`not_enough` names who is under way, since when, where; and that it can be met."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(NotNow) as refused:
            await made.take(groups=2, timeout_s=0.05)
        detail = refused.value.detail
        assert (refused.value.type, refused.value.retry_after_s) == ("not_enough", 1.0)
        assert (detail["ready"], detail["wanted"], detail["can_be_met"]) == (0, 2, True)
        [oldest] = detail["oldest"]
        assert oldest["sample_id"] == made.live_groups()[0].samples[0].sample_id
        assert (oldest["where"], oldest["worker"]) == ("generating", "w0")
        assert oldest["age_s"] >= 0.04
        assert detail["workers"]["w0"].startswith("ACTIVE")


async def test_more_than_the_plan_admits_is_refused_at_once(engine: FakeSGLang) -> None:
    """A take that can never be met does not wait out its timeout."""  # P22
    async with stage(engine, pushed=4) as made:
        with pytest.raises(NotNow) as refused:
            await made.take(groups=9, timeout_s=600.0)
        assert refused.value.detail["can_be_met"] is False


async def test_prompts_that_ran_out_end_the_wait(tmp_path: Path, engine: FakeSGLang) -> None:
    """With the source exhausted and too few groups left, a take fails as `exhausted`; the rest can be taken."""  # P22
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n{"input_ids": [3]}\n')
    async with stage(engine, prompts={"jsonl": str(path), "epochs": 1}) as made:
        with pytest.raises(NotNow) as refused:
            await made.take(groups=4, timeout_s=600.0)
        assert refused.value.type == "exhausted"
        assert len((await made.take(groups=3))["groups"]) == 3


async def test_a_dead_producer_fails_every_take_at_once() -> None:
    """A source that raises ends the producer: waiting takes and later calls get its traceback, `failed`."""  # P23
    prompts = {"source": "tests.support.sources:breaks"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, prompts=prompts, ready=False) as made:
        made.may_die = True
        waiting = [made.start(made.service.take_batch(step, 1, 600.0)) for step in range(3)]
        await made.service.ready()
        refused = await asyncio.gather(*waiting, return_exceptions=True)
        for error in refused:
            assert isinstance(error, NotNow)
            assert error.type == "failed"
            assert "Traceback" in error.detail["traceback"]
        with pytest.raises(NotNow) as later:
            await made.service.pause()
        assert later.value.type == "failed"
        assert made.service.state == "failed"
        assert [died.component for died in made.of(ComponentDied)] == ["producer"]
        assert made.service.status()["state"] == "failed"


async def test_bad_lines_of_a_source_fail_alone(engine: FakeSGLang) -> None:
    """Each is admitted and FAILED as `bad_prompt`, its problem in an event; production goes on to the end."""  # P23
    wrong = len(BAD_LINES)
    prompts, trainer = {"source": "tests.support.sources:some_are_wrong"}, {"train_batch_size": wrong}
    async with stage(engine, prompts=prompts, trainer=trainer) as made:
        batch = await made.take(groups=wrong)
        assert sorted(ids(batch)) == sorted(f"p{number}" for number in range(wrong))
        await made.service.ack(batch["batch_id"])
        with pytest.raises(NotNow) as refused:
            await made.take(step=1, groups=1, timeout_s=600.0)
        assert refused.value.type == "exhausted"
        assert (made.groups("failed"), made.samples("failed")) == (wrong, wrong)
        said = [(failed.reason, failed.final) for failed in made.of(SampleFailed)]
        assert said == [("bad_prompt", True)] * wrong
        assert all(failed.message.startswith("tasks.0.prompts.source.") for failed in made.of(SampleFailed))
        assert {settled.reason for settled in made.of(GroupSettled)} == {"bad_prompt"}


async def test_prompts_of_a_source_that_hangs_are_used(engine: FakeSGLang) -> None:
    """Two lines that came are two groups, though a third never comes; no other task is held up, nor the stop."""  # P33
    task = {"judger": {"path": "tests.support.judges:Judge"}, "agent": {"name": "single_turn"}}
    tasks = [
        {"name": "t", "prompts": {"push": True}, **task},
        {"name": "u", "prompts": {"source": "tests.support.sources:two_and_then_nothing"}, **task},
        {"name": "v", "prompts": {"source": "tests.support.sources:never"}, **task},
    ]
    async with stage(engine, tasks=tasks, pushed=2) as made:
        batch = await made.take(groups=4)
        assert {name: figures["groups"] for name, figures in batch["metrics"]["tasks"].items()} == {"t": 2, "u": 2}


async def test_only_completed_groups_leave(engine: FakeSGLang) -> None:
    """Failed, aborted and unjudged samples never show up in a batch, whatever is asked for."""  # P2

    def answer(call: Call) -> Reply | None:
        return None if call.prompt_ids[-1] == 0 else answered(call)

    engine.answer = answer
    async with stage(engine) as made:
        made.judge.verdict = lambda sample: ValueError("no") if sample.ground_truth == 1 else 1.0
        await made.push(4)
        await made.until(lambda: made.groups("failed") == 1 and made.groups("ready") == 2)
        await made.pause()
        batch = await made.take(groups=2)
        assert sorted(ids(batch)) == ["p2", "p3"]
        assert {sample["status"] for group in batch["groups"] for sample in group["samples"]} == {"COMPLETED"}
        with pytest.raises(NotNow) as refused:
            await made.take(step=1, groups=1, timeout_s=0.01)
        assert refused.value.type == "paused"


async def test_pushed_prompts_are_accepted_once_and_all_or_none(engine: FakeSGLang) -> None:
    """The same id counts once per task; one bad line refuses the whole push, with its path."""  # P35
    async with stage(engine) as made:
        assert await made.push(2) == 2
        assert await made.push(3) == 1
        with pytest.raises(BadRequest) as refused:
            await made.push([*lines(1, first=50), {"input_ids": [1], "typo": 1}])
        assert refused.value.detail == [{"path": "prompts.1.typo", "message": "unknown key"}]
        assert await made.push(lines(1, first=50)) == 1
        with pytest.raises(NotFound):
            await made.service.put_prompts("nobody", [])


async def test_conversations_without_a_template_are_not_accepted(engine: FakeSGLang) -> None:
    """A pushed line that could never become tokens is refused at its field."""  # P35
    async with stage(engine, tokenizer={"path": "bytes"}) as made:
        with pytest.raises(BadRequest) as refused:
            await made.push([{"messages": [{"role": "user", "content": "hello"}]}])
        assert [problem["path"] for problem in refused.value.detail] == ["prompts.0.messages"]


async def test_prompts_are_not_pushed_to_a_task_that_reads_a_file(tmp_path: Path, engine: FakeSGLang) -> None:
    """A task with a file of its own takes no prompts: 409."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n')
    async with stage(engine, prompts={"jsonl": str(path)}) as made:
        with pytest.raises(Conflict):
            await made.push(1)


async def test_tasks_are_mixed_by_their_weights(engine: FakeSGLang) -> None:
    """Admissions follow the weights of the tasks, and metrics are told apart."""  # P33
    task = {"prompts": {"push": True}, "judger": {"path": "tests.support.judges:Judge"}}
    tasks = [{"name": "t", "weight": 3.0, **task}, {"name": "u", "weight": 1.0, **task}]
    async with stage(engine, tasks=tasks, trainer={"train_batch_size": 8, "max_staleness": 0}, ready=False) as made:
        for name in ("t", "u"):
            await made.service.put_prompts(name, lines(20))
        await made.service.ready()
        batch = await made.take(groups=8)
        assert {name: figures["groups"] for name, figures in batch["metrics"]["tasks"].items()} == {"t": 6, "u": 2}


async def test_concurrency_follows_the_trainer(engine: FakeSGLang) -> None:
    """`set_concurrency` changes plan, limits and target together; what is impossible changes nothing."""
    engine.answer = None
    async with stage(engine, pushed=20) as made:
        await engine.wait_running(4)
        plan = await made.service.set_concurrency(trainer={"train_batch_size": 6})
        assert (plan["required"], plan["max_groups"]) == (6, 12)
        await engine.wait_running(6)
        for arguments in (
            {"trainer": {"train_batch_size": 0}},
            {"trainer": {"typo": 1}},
            {"trainer": {"update_interval": 3}},  # which max_staleness 1 cannot serve
            {"limits": {"w9": 1}},
            {"limits": {"w0": 0}},
            {"trainer": {"train_batch_size": 1_000_000, "prompt_repeat_k": 1_000_000}},
        ):
            with pytest.raises(BadRequest) as refused:
                await made.service.set_concurrency(**arguments)
            assert refused.value.detail[0]["path"].split(".")[0] in {"trainer", "limits"}
        assert made.service.concurrency() == plan
        limited = await made.service.set_concurrency(limits={"w0": 7})
        assert limited["allowed"] == 7
        assert made.service.workers()[0]["limit"] == 7


async def test_a_step_far_ahead_of_the_weights_burns_no_prompts(engine: FakeSGLang) -> None:
    """What is ready expires, nothing is begun that must, and the answer says which weights that step needs."""  # P22
    async with stage(engine, pushed=12, trainer={"train_batch_size": 2, "max_staleness": 1}) as made:
        await made.until(lambda: made.groups("ready") >= 2)
        with pytest.raises(NotNow) as refused:
            await made.take(step=9, groups=2, timeout_s=0.3)
        assert "version 8 or later, the fleet is at 0" in refused.value.message
        assert refused.value.detail["can_be_met"] is True  # by an update
        admitted = made.service.status()["ledger"]["groups"]["admitted"]
        assert admitted < 12
        assert len((await made.take(step=0, groups=2))["groups"]) == 2
