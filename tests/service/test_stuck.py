"""Who is stuck: each place a sample can be in, found with the real service over a real socket."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout_svc.engines import Endpoint
from rollout_svc.errors import BadRequest, NotNow
from rollout_svc.stuck import MOST_CHAINS, MOST_LISTED
from tests.support.bell import WAIT_S
from tests.support.fake_sglang import FakeSGLang, Reply, Status
from tests.support.stage import Stage, stage
from tests.support.stores import Store

LOOPS = "tests.support.loops"
JUDGES = "tests.support.judges"


def stuck(made: Stage, where: str) -> list[dict[str, Any]]:
    """The samples in a place; the counts must agree with what is listed."""
    record = made.service.stuck(0)
    listed = [sample["where"] for sample in record["samples"]]
    assert record["counts"] == {place: listed.count(place) for place in set(listed)}
    assert all(sample["age_s"] >= 0 and sample["since_s"] >= 0 for sample in record["samples"])
    return [sample for sample in record["samples"] if sample["where"] == where]


async def the_one(made: Stage, where: str) -> dict[str, Any]:
    """Wait until exactly one sample is there."""
    await made.until(lambda: len(stuck(made, where)) == 1, where)
    return stuck(made, where)[0]


def waits_in(sample: dict[str, Any], function: str) -> bool:
    """Whether a function is on the sample's await chain."""
    return any(entry.rpartition(":")[0].endswith(function) for entry in sample["awaits"])


async def test_generating_says_where() -> None:
    """At which worker, in which attempt, since when, with its await chain from the run to the socket."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        sample = await the_one(made, "generating")
        [group] = made.live_groups()
        assert (sample["sample_id"], sample["group_id"]) == (group.samples[0].sample_id, group.group_id)
        assert (sample["task"], sample["lane"], sample["status"]) == ("t", "train", "GENERATING")
        assert (sample["worker"], sample["judger"], sample["at"]) == ("w0", None, None)
        assert (sample["attempt"], sample["tokens"]) == (1, 0)
        assert sample["awaits"][0].startswith("rollout_svc.rollout.run.GroupRun._run:")
        assert waits_in(sample, "rollout_agents.single_turn.SingleTurn.run")
        assert sample["awaits"][-1].startswith("aiohttp.")


async def test_frozen_by_a_pause() -> None:
    """A request that a pause holds still is told as such, and as generating again when it goes on."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(2.0, mode="keep")
        assert (await the_one(made, "frozen"))["worker"] == "w0"
        await made.resume()
        await the_one(made, "generating")


async def test_the_other_lane_is_listed_too() -> None:
    """An evaluation's samples are found where they are, with their lane; so is what of it waits for a lane."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(1)
        sample = await the_one(made, "generating")
        assert (sample["lane"], sample["task"], sample["worker"]) == ("eval", "t", "w0")
        await made.pause(2.0, lanes=("eval",))
        [group] = made.service.stuck(0.0)["groups"]
        assert (group["lane"], group["where"], group["reason"]) == ("eval", "buffered", "gate_closed")
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=1)
        await evaluating


async def test_queued_for_a_slot() -> None:
    """Two samples, one slot: the second is in line, at no worker, for as long as it has been."""  # P22
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, trainer={"prompt_repeat_k": 2, "train_batch_size": 1}) as made,
    ):
        await engine.wait_running(2)
        await made.service.set_concurrency(limits={"w0": 1})
        await made.push(2, first=1)
        engine.release(tokens=1)
        await made.until(lambda: made.groups("ready") == 1)
        queued = await the_one(made, "queued")
        assert (queued["worker"], len(stuck(made, "generating"))) == (None, 1)
        assert waits_in(queued, "Line.wait")
        engine.answer = lambda _: Reply(tokens=1)
        engine.release(tokens=1)
        await made.take(groups=2)
        assert not made.parts.pool.line.waits


async def test_retrying_after_a_failure() -> None:
    """Between two tries a sample rests, and a pause that wakes it leaves nothing behind."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.script("/generate", Status(503, headers={"Retry-After": "30"}), times=None)
        async with stage(engine, pushed=1) as made:
            retrying = await the_one(made, "retrying")
            assert retrying["worker"] is None
            assert waits_in(retrying, "GateSignals.sleep_while_open")
            await made.pause()
            assert not made.parts.pool.line.waits


@contextmanager
def full_port() -> Iterator[str]:
    """An address whose accept queue is full: a connection to it is never made."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_connecting_to_an_engine_that_accepts_nothing() -> None:
    """A call without a connection is told from one that its engine works on."""  # P22
    with full_port() as url:
        async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
            worker = made.worker()
            worker.endpoint = Endpoint(url, None, None)
            await made.push(1)
            async with asyncio.timeout(WAIT_S):
                while not stuck(made, "connecting"):  # noqa: ASYNC110 - nothing tells of a connection that is not made
                    await asyncio.sleep(0)
            [connecting] = stuck(made, "connecting")
            assert connecting["worker"] == "w0"
            assert not stuck(made, "generating")


async def test_judging_and_waiting_for_the_judge() -> None:
    """In which judger, with the judger's own chain after the sample's; who waits for a place is told apart."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=3)
        judger = {"path": f"{JUDGES}:Judge", "concurrency": 1}
        async with stage(engine, judger=judger) as made:
            made.judge.hold = True
            await made.push(2)
            await made.until(lambda: made.judge.held == 1 and len(stuck(made, "waiting_for_judge")) == 1)
            [judging], [waiting] = stuck(made, "judging"), stuck(made, "waiting_for_judge")
            assert (judging["judger"], judging["status"], judging["tokens"]) == (f"{JUDGES}:Judge", "JUDGING", 3)
            assert judging["awaits"].index(f"task judge:{judging['sample_id']}") > 0
            assert waits_in(judging, "judges.Judge._wait")
            assert waiting["judger"] == judging["judger"]
            assert waits_in(waiting, "JudgeDesk.enter")
            made.judge.release()
            await made.take(groups=2)


async def test_judging_a_whole_group() -> None:
    """Every member of a group that is judged at once is in its judger."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        judger, trainer = {"path": f"{JUDGES}:GroupJudge"}, {"prompt_repeat_k": 3}
        async with stage(engine, judger=judger, trainer=trainer) as made:
            made.judge.hold = True
            await made.push(1)
            await made.until(lambda: len(stuck(made, "judging")) == 3)
            assert all(waits_in(sample, "GroupJudge.judge_group") for sample in stuck(made, "judging"))
            made.judge.release()
            await made.take()


async def test_parked_in_its_own_tool_and_at_the_gate() -> None:
    """A loop that parks says where it does; while it only works in its tool it counts from its last answer."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine, agent={"path": f"{LOOPS}:ToolUser"}) as made:
        await made.push(1)
        await engine.wait_running(1)
        await made.pause()
        parked = await the_one(made, "parked")
        assert (parked["at"], parked["worker"]) == ("gate", None)
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=2)
        await made.until(lambda: made.agent.waiting == 1)
        parked = await the_one(made, "parked")
        assert (parked["at"], parked["tokens"]) == ("tool", made.live_groups()[0].samples[0].response_length)
        assert parked["since_s"] <= parked["age_s"]
        assert waits_in(parked, "ToolUser.run")
        engine.answer = lambda _: Reply(tokens=1)
        made.agent.go_on.set()
        await made.take()


async def test_a_loop_that_does_not_park_is_in_its_own_code() -> None:
    """What a pause would cancel is not called parked."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        agent = {"path": f"{LOOPS}:ToolUser", "on_pause": "abort"}
        async with stage(engine, agent=agent) as made:
            await made.push(1)
            sample = await the_one(made, "in_agent")
            assert sample["at"] == "tool"
            made.agent.go_on.set()
            await made.take()


async def test_waiting_for_siblings_and_putting() -> None:
    """A member that is done waits for the others, in no task; when all are, the group is being put."""  # P22
    store = Store()
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, storage=store, trainer={"prompt_repeat_k": 2}) as made,
    ):
        store.bell, store.block = made.bell, True
        await made.push(1)
        await engine.wait_running(2)
        engine.release(engine.calls("running")[0], tokens=1)
        waiting = await the_one(made, "waiting_for_siblings")
        assert (waiting["status"], waiting["awaits"]) == ("COMPLETED", [])
        with pytest.raises(NotNow) as refused:
            await made.take(timeout_s=0.0)
        # The one to blame comes first, whoever is older.
        assert [sample["where"] for sample in refused.value.detail["oldest"]] == [
            "generating",
            "waiting_for_siblings",
        ]
        engine.release(tokens=1)
        await made.until(lambda: store.saving == 1 and len(stuck(made, "putting")) == 2)
        assert all(waits_in(sample, "Store.save") for sample in stuck(made, "putting"))
        store.go_on.set()
        await made.take()


async def test_stragglers_and_clinging_judges_are_listed() -> None:
    """Tasks that outlived their group, and judges that outlived their call, until they end."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        async with stage(engine, agent={"path": f"{LOOPS}:Clinging", "on_pause": "abort"}) as made:
            await made.push(1)
            await made.until(lambda: made.agent.waiting == 1)
            await made.pause(0.3)
            straggler = await the_one(made, "straggler")
            assert (straggler["task"], straggler["attempt"]) == ("t", None)
            assert waits_in(straggler, "Clinging.run")
            made.agent.go_on.set()
            await made.until(lambda: not stuck(made, "straggler"))
        async with stage(engine, judger={"path": f"{JUDGES}:Judge"}) as made:
            made.judge.hold = made.judge.deaf = True
            await made.push(1)
            await made.until(lambda: made.judge.held == 1)
            await made.pause(0.3)
            clinging = await the_one(made, "clinging_judge")
            assert (clinging["task"], clinging["judger"]) == ("t", f"{JUDGES}:Judge")
            assert waits_in(clinging, "judges.Judge._wait")
            made.judge.release()
            await made.until(lambda: not stuck(made, "clinging_judge"))


async def test_groups_in_the_buffer_say_why_they_wait() -> None:
    """Handed back groups are listed apart: the gate is closed, they rest, or no worker is in traffic."""  # P22
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        [group] = made.service.stuck(0)["groups"]
        assert (group["where"], group["reason"], group["lane"], group["task"]) == (
            "buffered",
            "gate_closed",
            "train",
            "t",
        )
        assert (group["hand_backs"], group["samples"]) == (1, {"ABORTED": 1})
        assert made.service.stuck(600)["groups"] == []
        await engine.kill()
        await made.resume()
        await made.until(lambda: [g["reason"] for g in made.service.stuck(0)["groups"]] in (["no_worker"], ["resting"]))


async def test_only_what_is_older_is_told_oldest_first() -> None:
    """The threshold is by age of the attempt; the default is what a pause may take; bad ones are refused."""  # P22 P35
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=3) as made:
        await engine.wait_running(3)
        record = made.service.stuck(0)
        ages = [sample["age_s"] for sample in record["samples"]]
        assert (len(ages), ages) == (3, sorted(ages, reverse=True))
        assert made.service.stuck(600) == {
            "older_than_s": 600,
            "counts": {},
            "samples": [],
            "groups": [],
            "omitted": 0,
            "groups_omitted": 0,
        }
        assert made.service.stuck()["older_than_s"] == made.service.config.pause.deadline_s
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(BadRequest, match="older_than_s"):
                made.service.stuck(bad)


async def test_it_can_be_asked_in_every_state() -> None:
    """Starting, pausing, paused, stopping: there is always an answer, and asking changes nothing."""  # P22
    async with FakeSGLang(weight_version="0") as engine:
        engine.lose_aborts = True
        async with stage(engine, pushed=1, ready=False) as made:
            assert (made.service.state, made.service.stuck(0)["counts"]) == ("starting", {})
            await made.service.ready()
            await engine.wait_running(1)
            pausing = made.start(made.pause(1.0))
            await engine.wait_aborts(1)
            assert (made.service.state, made.service.stuck(0)["counts"]) == ("pausing", {"generating": 1})
            await pausing
            assert (made.service.state, made.service.stuck(0)["counts"]) == ("paused", {})
        assert (made.service.state, made.service.stuck(0)["counts"]) == ("stopping", {})


async def test_a_crowd_is_counted_and_the_oldest_listed() -> None:
    """Beyond the cap samples are counted only; chains are read of the oldest; the loop is not held for long."""
    count = MOST_LISTED + 24
    trainer = {"train_batch_size": count, "max_batch_per_worker": 2 * count}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=count, trainer=trainer) as made:
        await engine.until(lambda: engine.running == count, "all running", 40.0)
        gc.collect()
        gc.disable()  # the collector's time is not ours, and `serve` keeps it rare
        try:
            took = []
            for _ in range(5):
                started = time.thread_time()  # it awaits nothing: what it holds the loop for is what it works
                record = made.service.stuck(0)
                took.append(time.thread_time() - started)
        finally:
            gc.enable()
        assert record["counts"] == {"generating": count}
        assert (len(record["samples"]), record["omitted"]) == (MOST_LISTED, 24)
        assert [sample["awaits"] is not None for sample in record["samples"]].count(True) == MOST_CHAINS
        assert min(took) < 0.05
