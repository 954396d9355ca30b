"""What a trainer is handed: old tokens masked, tasks mixed by weight, and a buffer that is bounded and says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import LeaseExpired, ProducerWaiting
from rollout_svc.rpc.bodies import Trainer
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import Stage, lines, stage

NAMES = ("t", "u", "v")
"""Three tasks; the number that a prompt ends with says which is its task."""


def disk(folder: Path) -> dict[str, str]:
    """Weights that any fake engine loads."""
    return {"kind": "disk", "path": str(folder)}


def several(*weights: float, **more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make tasks of these weights, with further keys by task name."""
    task = {"prompts": {"push": True}, "judger": {"path": "tests.support.judges:Judge"}}
    return [
        {"name": name, "weight": weight, **task, **more.get(name, {})}
        for name, weight in zip(NAMES, weights, strict=False)
    ]


async def fill(made: Stage, count: int, *names: str) -> None:
    """Push prompts to tasks; the last token tells the task and the number."""
    for name in names:
        prompts = [line | {"input_ids": [NAMES.index(name), line["ground_truth"]]} for line in lines(count)]
        await made.service.put_prompts(name, prompts)


def of_task(call: Call) -> str:
    """The task of an engine's call."""
    return NAMES[call.prompt_ids[0]]


def mixed(batch: Mapping[str, Any]) -> dict[str, int]:
    """Groups of a batch by task."""
    return dict(Counter(group["task"] for group in batch["groups"]))


def figures(made: Stage, name: str) -> dict[str, Any]:
    """What the status says of a task."""
    told: dict[str, Any] = made.service.status()["producer"]["tasks"][name]
    return told


async def ended(made: Stage, leases: int) -> None:
    """Wait until so many leases have ended."""
    await made.until(lambda: len(made.of(LeaseExpired)) == leases)


def masks(batch: Mapping[str, Any]) -> list[list[int]]:
    """The loss masks of a batch."""
    return [sample["loss_mask"] for group in batch["groups"] for sample in group["samples"]]


# -- tokens --------------------------------------------------------------------------------------------------


async def test_tokens_beyond_their_bound_are_masked(tmp_path: Path) -> None:
    """Two tokens of version 0, three of 1: what counts depends on the step, also when lent again."""  # P32
    trainer = {"max_staleness": 3, "max_token_staleness": 1}
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, trainer=trainer, buffer={"lease_s": 0.5}) as made,
    ):
        engine.tokens_so_far = 2
        await engine.wait_running(1)
        await made.service.update_weights(1, disk(tmp_path), pause={})
        await engine.wait_requests(2)
        engine.release(tokens=[7, 8, 9])
        for lent, (step, mask) in enumerate([(1, [1, 1, 1, 1, 1]), (2, [0, 0, 1, 1, 1])], start=1):
            batch = await made.take(step=step)
            assert masks(batch) == [mask]
            assert batch["metrics"]["masked_tokens"] == mask.count(0)
            assert batch["metrics"]["tasks"]["t"]["masked_tokens"] == mask.count(0)
            [sample] = batch["groups"][0]["samples"]
            assert sample["response_ids"][2:] == [7, 8, 9]
            assert all(sample["logprobs"])
            assert await made.take(step=step) == batch
            await ended(made, lent)
        with pytest.raises(NotNow):
            await made.take(step=3, timeout_s=0.0)
        assert made.service.status()["ledger"]["groups"]["expired"] == 1
        taking = made.start(made.take(step=2))
        await made.push(1, first=5)
        await engine.wait_running(1)
        engine.release(tokens=[1])
        batch = await taking
        assert (masks(batch), batch["metrics"]["settled"]) == ([[1]], {"expired:tokens_stale": 1})


async def test_the_bound_on_tokens_can_be_changed_while_it_runs(tmp_path: Path) -> None:
    """`PUT /v1/concurrency` sets it for what is handed over from then on; null takes it away."""  # P32
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, trainer={"max_staleness": 3}, buffer={"lease_s": 0.1}) as made,
    ):
        engine.tokens_so_far = 2
        await engine.wait_running(1)
        await made.service.update_weights(1, disk(tmp_path), pause={})
        await engine.wait_requests(2)
        engine.release(tokens=[7])
        for lent, (bound, mask) in enumerate([(None, [1, 1, 1]), (0, [0, 0, 1]), (None, [1, 1, 1])], start=1):
            body = Trainer.model_validate({"max_token_staleness": bound}).model_dump(exclude_unset=True)
            await made.service.set_concurrency(trainer=body)
            assert masks(await made.take(step=1)) == [mask]
            await ended(made, lent)


async def test_a_masked_batch_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """The step that was leased gives the batch as it was lent, though the bound is another one by now."""  # P31 P32
    journal = tmp_path / "life.sqlite"
    async with FakeSGLang(weight_version="0") as engine:
        engine.tokens_so_far = 2
        trainer: dict[str, Any] = {"max_staleness": 3, "max_token_staleness": 0}
        async with stage(engine, pushed=1, trainer=trainer, buffer={"path": str(journal)}) as made:
            await engine.wait_running(1)
            await made.service.update_weights(1, disk(tmp_path), pause={})
            await engine.wait_requests(2)
            engine.release(tokens=[7])
            batch = await made.take(step=1)
            assert masks(batch) == [[0, 0, 1]]
        trainer = {"max_staleness": 3, "max_token_staleness": None}
        async with stage(engine, trainer=trainer, buffer={"path": str(journal)}, ready=False) as made:
            assert await made.take(step=1) == batch


# -- tasks ---------------------------------------------------------------------------------------------------


async def test_a_batch_waits_for_the_share_of_a_slow_task() -> None:
    """Enough is ready, but not of the slow one: the take waits, says for whom, and gets it."""  # P22 P33
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: None if of_task(call) == "u" else Reply(tokens=1)
        async with stage(engine, tasks=several(1.0, 1.0), trainer={"max_staleness": 3}) as made:
            await fill(made, 20, "t", "u")
            await made.until(lambda: made.groups("ready") >= 4)
            with pytest.raises(NotNow) as refused:
                await made.take(groups=4, timeout_s=0.05)
            assert refused.value.detail["missing"] == {"u": 2}
            assert refused.value.detail["can_be_met"] is True
            assert "2 of task u are missing" in refused.value.message
            taking = made.start(made.take(groups=4))
            await engine.wait_running(2)
            engine.release()
            assert mixed(await taking) == {"t": 2, "u": 2}


@pytest.mark.parametrize("why", ["exhausted", "failing", "limit", "paused", "fleet"])
async def test_a_task_that_cannot_come_is_filled_in_for(tmp_path: Path, why: str) -> None:
    """No prompts, failing and resting, at its limit, paused, or no engine: others fill its place."""  # P33
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1, 0]}\n')
    more: dict[str, Any] = {"max_groups": 1} if why == "limit" else {}
    if why == "exhausted":
        more["prompts"] = {"jsonl": str(path), "epochs": 1}
    async with FakeSGLang(weight_version="0") as engine:
        held = why in ("paused", "fleet")
        engine.answer = lambda call: None if held and of_task(call) == "u" else Reply(tokens=1)
        trainer = {"max_staleness": 3}
        async with stage(engine, tasks=several(1.0, 1.0, u=more), trainer=trainer, ready=False) as made:
            judge = made.service.prepared.runtimes["u"].desk._judger
            if why == "failing":
                judge.verdict = lambda _: ValueError("no")
            await fill(made, 40, *(("t",) if why == "exhausted" else ("t", "u")))
            await made.service.ready()
            wanted = 1 if why in ("exhausted", "limit") else 0
            await made.until(lambda: made.groups("ready") >= 4 and figures(made, "u")["ready"] == wanted)
            if why == "paused":
                await made.pause()
            if why == "fleet":
                await made.service.remove_worker("w0")
            if why == "failing":
                await made.until(lambda: figures(made, "u")["waiting_for"] != "")
            batch = await made.take(groups=4)
            assert mixed(batch).get("u", 0) == wanted
            assert len(batch["groups"]) == 4
            obstacles = {"exhausted": "exhausted", "limit": "task_limit", "failing": "every_group_fails"}
            assert figures(made, "u")["waiting_for"] == obstacles.get(why, "")


async def test_a_take_that_waits_for_a_task_gives_up_on_it_when_its_groups_fail() -> None:
    """The last group of a task fails while the batch waits for it: the batch is filled and handed over."""  # P33
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: None if of_task(call) == "u" else Reply(tokens=1)
        async with stage(engine, tasks=several(1.0, 1.0), trainer={"max_staleness": 3}) as made:
            made.service.prepared.runtimes["u"].desk._judger.verdict = lambda _: ValueError("no")
            await fill(made, 20, "t")
            await fill(made, 1, "u")
            await made.until(lambda: made.groups("ready") >= 4)
            taking = made.start(made.take(groups=4))
            await engine.wait_running(1)
            engine.release()
            assert mixed(await taking) == {"t": 4}


async def test_three_tasks_keep_their_shares() -> None:
    """5:3:1, one that answers last, one that fails half, one filtered: within a group every 10 batches."""  # P33
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: None if of_task(call) == "t" else Reply(tokens=1)
        trainer = {"train_batch_size": 9, "max_staleness": 3}
        tasks = several(5.0, 3.0, 1.0, v={"filter": {"path": "tests.support.filters:InlineFilter"}})
        async with stage(engine, tasks=tasks, trainer=trainer) as made:
            desk: Any = made.service.prepared.runtimes["v"].filter
            desk._keep.__self__.verdict = lambda group: "dull" if group.ground_truth % 3 else None
            failing = made.service.prepared.runtimes["u"].desk._judger
            failing.verdict = lambda sample: 1.0 if sample.ground_truth % 2 else ValueError("no")
            await fill(made, 300, *NAMES)
            had: Counter[str] = Counter()
            batch_id: list[str] = []
            for number in range(1, 31):
                taking = made.start(made.take(groups=8, ack=batch_id, step=number % 2))
                while not taking.done():
                    held = engine.calls("running")
                    if held:
                        engine.release(held[0])
                    await asyncio.sleep(0)
                batch = await taking
                batch_id = [batch["batch_id"]]
                had.update(mixed(batch))
                if number % 10 == 0:
                    for name, weight in zip(NAMES, (5, 3, 1), strict=True):
                        assert abs(had[name] - 8 * number * weight / 9) <= 1
            for name in NAMES:
                assert figures(made, name)["consumed"] + figures(made, name)["leased"] == had[name]
            assert made.groups("failed") > 60
            assert made.groups("filtered") > 40


async def test_a_lease_that_ends_owes_what_it_owed_before() -> None:
    """Batches that are never acknowledged do not shift the mix: what comes back is owed again."""  # P33
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        trainer = {"train_batch_size": 6, "max_staleness": 3}
        async with stage(engine, tasks=several(2.0, 1.0), trainer=trainer, buffer={"lease_s": 0.05}) as made:
            await fill(made, 40, "t", "u")
            for lent in range(1, 4):
                assert mixed(await made.take(groups=5)) == {"t": 3, "u": 2}
                await ended(made, lent)
                assert all(abs(owed) < 1e-9 for owed in made.parts.producer.mixture.carry.values())


async def test_a_task_keeps_to_its_limit() -> None:
    """`max_groups` counts what is admitted and not settled, leased groups included; an ack makes room."""  # P33
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        tasks = several(1.0, 1.0, t={"max_groups": 2})
        async with stage(engine, tasks=tasks, trainer={"max_staleness": 3}) as made:
            await fill(made, 20, "t")
            await made.until(lambda: made.groups("ready") == 2)
            assert made.service.status()["producer"]["waiting_for"] == "task_limit"
            batch = await made.take(groups=2)
            assert (made.groups("admitted"), made.groups("leased")) == (2, 2)
            await made.service.ack(batch["batch_id"])
            await made.until(lambda: made.groups("ready") == 2)
            assert made.groups("admitted") == 4


async def test_more_than_the_tasks_limits_allow_is_refused_at_once() -> None:
    """A take of more groups than all tasks may have does not wait out its timeout."""  # P22
    tasks = several(1.0, 1.0, t={"max_groups": 3}, u={"max_groups": 1})
    async with FakeSGLang(weight_version="0") as engine, stage(engine, tasks=tasks) as made:
        with pytest.raises(NotNow) as refused:
            await made.take(groups=5, timeout_s=600.0)
        assert refused.value.detail["can_be_met"] is False
        assert "allow 4 groups" in refused.value.message


# -- bytes ---------------------------------------------------------------------------------------------------


async def test_a_full_buffer_admits_nothing_and_loses_nothing() -> None:
    """At the bound no prompt is used up, what is begun goes on; an ack makes room; nothing is ever put out."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=4)
        trainer = {"train_batch_size": 2, "max_staleness": 20}
        async with stage(engine, pushed=60, trainer=trainer, buffer={"max_bytes": 3000}) as made:
            await made.until(lambda: made.service.status()["producer"]["waiting_for"] == "buffer_full")
            status = made.service.status()["buffer"]
            assert status["bytes"] >= 3000
            held = [group for group in made.live_groups() if group.account == "ready"]
            assert status["bytes"] == sum(group.payload_bytes for group in held)
            most = max(group.payload_bytes for group in held)
            assert status["bytes"] <= 3000 + 2 * most, "more was begun than the engines were asked for at once"
            [detail] = [event.detail for event in made.of(ProducerWaiting)]
            assert detail == f"buffer.max_bytes is 3000, finished groups take {status['bytes']}"
            admitted = made.groups("admitted")
            assert admitted < 60
            batch = await made.take(groups=2)
            assert made.service.status()["buffer"]["bytes"] == status["bytes"]
            await made.service.ack(batch["batch_id"])
            await made.until(lambda: made.groups("admitted") > admitted)
            assert made.groups("expired") == made.groups("filtered") == made.groups("failed") == 0


async def test_what_is_unfinished_goes_on_in_a_full_buffer() -> None:
    """A group that a pause cut is finished although the buffer has filled up: nothing is stuck half-way."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: None if call.prompt_ids[-1] == 0 else Reply(tokens=4)
        engine.tokens_so_far = 1
        trainer = {"train_batch_size": 2, "max_staleness": 20}
        async with stage(engine, pushed=60, trainer=trainer, buffer={"max_bytes": 1000}) as made:
            await made.until(lambda: made.parts.buffer.full and made.groups("in_flight") == 1)
            await made.pause()
            assert made.groups("aborted") == 1
            engine.answer = lambda _: Reply(tokens=3)
            await made.resume()
            await made.until(lambda: made.groups("in_flight") + made.groups("aborted") == 0)
            assert made.parts.buffer.full


async def test_a_buffer_that_is_too_small_for_a_batch_is_told_at_once() -> None:
    """Ready groups alone fill it and are too few: the take says so with the numbers, and that it is final."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=4)
        trainer = {"train_batch_size": 2, "max_staleness": 20}
        async with stage(engine, pushed=60, trainer=trainer, buffer={"max_bytes": 1000}) as made:
            with pytest.raises(NotNow) as refused:
                await made.take(groups=30, timeout_s=600.0)
            detail = refused.value.detail
            assert (refused.value.type, detail["can_be_met"]) == ("not_enough", False)
            buffer = detail["buffer"]
            assert (buffer["path"], buffer["max_bytes"]) == ("buffer.max_bytes", 1000)
            assert buffer["bytes"] == made.parts.buffer.bytes
            assert buffer["ready"] == made.groups("ready") == len((await made.take(groups=buffer["ready"]))["groups"])
            for number in (1000, buffer["bytes"], buffer["ready"]):
                assert str(number) in refused.value.message


async def test_a_bound_below_one_batch_is_noticed_when_sizes_are_known() -> None:
    """As soon as the buffer is full for the first time the log says how much a batch would take."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: Reply(tokens=4) if call.prompt_ids[-1] < 2 else None
        trainer = {"train_batch_size": 8, "max_staleness": 1}
        async with stage(engine, pushed=60, trainer=trainer, buffer={"max_bytes": 300}) as made:
            await made.until(lambda: made.groups("ready") == 2)
            engine.release(engine.calls("running")[0])  # the requests are below their target: it would go on
            await made.until(lambda: bool(made.of(ProducerWaiting)))
            [event] = made.of(ProducerWaiting)
            mean = made.parts.buffer.bytes // made.groups("ready")
            assert event.reason == "buffer_full"
            assert "a batch of 8 groups would take about" in event.detail
            told = int(event.detail.rsplit(" ", 1)[1])
            assert abs(told - 8 * mean) <= 8


async def test_what_is_too_old_makes_room_in_a_full_buffer() -> None:
    """A full buffer of groups that no step will take does not shut the stage: a take expires them."""  # P32
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: Reply(tokens=4) if call.prompt_ids[-1] < 4 else None
        trainer = {"train_batch_size": 8, "max_staleness": 1}
        async with stage(engine, pushed=60, trainer=trainer, buffer={"max_bytes": 1000}) as made:
            await made.until(lambda: made.groups("ready") == 4)
            assert made.parts.buffer.full
            with pytest.raises(NotNow) as refused:
                await made.take(step=2, groups=8, timeout_s=0.05)
            assert refused.value.detail["ready"] == 0
            assert (made.groups("expired"), made.parts.buffer.bytes) == (4, 0)


async def test_a_small_take_is_not_left_waiting_for_whom_a_whole_batch_would_not_need() -> None:
    """One group is task u's turn, two would be one of t and one of v: what the take lacks is made, not what two do."""
    trainer = {"train_batch_size": 2, "over_sample_threshold": 3.0}
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, tasks=several(2, 0.3, 5), trainer=trainer, producer={"strategy": "async"}) as made,
    ):
        engine.answer = lambda _: Reply(tokens=[1])
        await fill(made, 1, "t")
        await fill(made, 2, "v")
        await made.until(lambda: figures(made, "t")["ready"] + figures(made, "v")["ready"] >= 2)
        made.parts.producer.mixture.carry = {"t": 0.41, "u": 0.59, "v": 0.05}
        await fill(made, 1, "u")
        assert mixed(await made.take(groups=1, timeout_s=5.0)) == {"u": 1}
