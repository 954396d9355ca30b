"""Who pauses, who resumes, and in which order: joins, tickets, flapping, and callers that go away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_svc.errors import BadRequest, Conflict
from rollout_svc.events import PauseStarted, Resumed
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import SLACK_S, Stage, stage

LONG = {"max_tokens": 512}


def open_files() -> int:
    """Count what this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def stuck(made: Stage, engine: FakeSGLang, running: int = 1) -> None:
    """Bring the stage to where a pause has something to wait for: the engine runs, and loses its aborts."""
    engine.lose_aborts = True
    await engine.wait_running(running)


async def test_two_pauses_are_one() -> None:
    """A pause that finds one under way joins it: one report, one ticket, the gate closed once."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        first, second = made.start(made.pause()), made.start(made.pause())
        await engine.wait_aborts(1)
        engine.release(tokens=1)
        assert await first is await second
        assert made.service.status()["ticket"] == 1
        assert [started.joined for started in made.of(PauseStarted)] == [False, True]


async def test_the_earlier_deadline_holds_for_both() -> None:
    """Joining with an earlier deadline brings the first caller home by it as well."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        loop = asyncio.get_running_loop()
        started = loop.time()
        slow = made.start(made.pause(30.0))
        await engine.wait_aborts(1)
        quick = await made.pause(0.6)
        assert await slow is quick
        assert loop.time() - started <= 0.6 + SLACK_S + 0.1
        assert not quick.clean


async def test_a_later_deadline_changes_nothing() -> None:
    """Joining with a later deadline does not keep the first caller waiting."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        quick = made.start(made.pause(0.5))
        await engine.wait_aborts(1)
        slow = made.start(made.pause(30.0))
        assert await quick is await slow


async def test_a_pause_in_the_report_tenth_keeps_its_own_deadline() -> None:
    """A pause that comes when the first one only waits for engines' counts still returns by its deadline."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.loads = (1, 0)  # it claims to be busy for ever
        first = made.start(made.pause(20.0))
        await engine.wait_hits("/v1/loads", 2)
        await made.pause(0.4)
        assert (await first).ticket == 1
        engine.loads = None


async def test_a_join_takes_the_union_of_lanes() -> None:
    """Pausing one lane and then the other closes both under one ticket."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        one = made.start(made.pause(lanes=("train",)))
        await engine.wait_aborts(1)
        assert made.parts.gate.is_open("eval")
        two = made.start(made.pause(lanes=("eval",)))
        await made.until(lambda: not made.parts.gate.is_open("eval"))
        engine.release(tokens=1)
        assert await one is await two
        assert made.parts.pauses.drained == {"train", "eval"}
        await made.resume()
        assert made.parts.gate.is_open("train")
        assert made.parts.gate.is_open("eval")


async def test_pausing_what_is_paused_answers_at_once_with_the_same_ticket() -> None:
    """`pause` is idempotent: nothing is aborted again."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        first = await made.pause()
        again = await made.pause()
        assert (again.ticket, again.as_json()) == (first.ticket, first.as_json())
        assert len(engine.aborts) == 1


async def test_a_second_lane_can_be_paused_after_the_first() -> None:
    """While `train` is paused, a pause of both lanes drains the other one too."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(lanes=("train",))
        assert made.parts.pauses.drained == {"train"}
        await made.pause()
        assert made.parts.pauses.drained == {"train", "eval"}


async def test_a_late_pause_with_an_old_ticket_leaves_it_running() -> None:
    """pause; pause; resume; then a pause that was sent before: 409 with both numbers, and the stage runs on."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        assert (await made.pause(if_ticket=0)).ticket == 1
        assert (await made.pause(if_ticket=1)).ticket == 1
        await made.resume(ticket=1)
        with pytest.raises(Conflict) as refused:
            await made.pause(if_ticket=0)
        assert refused.value.detail == {"if_ticket": 0, "current": 1}
        assert made.service.state == "running"
        await engine.wait_requests(2)
        assert len(engine.aborts) == 1


async def test_a_joining_pause_may_name_the_ticket_the_first_started_from() -> None:
    """Two callers that both saw ticket 0 both get pause 1."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        first = made.start(made.pause(if_ticket=0))
        await engine.wait_aborts(1)
        second = made.start(made.pause(if_ticket=0))
        third = made.start(made.pause(if_ticket=1))
        with pytest.raises(Conflict):
            await made.pause(if_ticket=7)
        engine.release(tokens=1)
        assert [(await one).ticket for one in (first, second, third)] == [1, 1, 1]


async def test_resuming_with_an_old_ticket_is_refused() -> None:
    """Whoever resumes a pause that is over is told so, and the newer pause stays."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        await made.resume(ticket=1)
        await made.pause()
        with pytest.raises(Conflict) as refused:
            await made.resume(ticket=1)
        assert refused.value.detail == {"ticket": 1, "current": 2}
        assert made.service.state == "paused"
        await made.resume(ticket=2)


async def test_resume_waits_for_the_report_of_a_pause_under_way() -> None:
    """A resume during a pause opens the gate after the report, not before."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        pausing = made.start(made.pause())
        await engine.wait_aborts(1)
        resuming = made.start(made.resume())
        await engine.wait_aborts(2)
        assert not resuming.done()
        assert made.service.state == "pausing"
        engine.lose_aborts = False
        assert (await pausing).clean
        assert (await resuming)["state"] == "running"
        await engine.wait_requests(2)


async def test_a_pause_while_another_resume_waits() -> None:
    """A resume with a ticket does not end the pause that came after the one it meant."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        await made.resume()
        await made.pause()
        assert (await made.resume(ticket=2))["state"] == "running"
        assert [resumed.ticket for resumed in made.of(Resumed)] == [1, 2]


async def test_two_hundred_flaps_leak_nothing() -> None:
    """Pause and resume 200 times: no task and no open file more than before, and no token too many."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4, sampling=LONG) as made:
        engine.tokens_so_far = 1
        await engine.wait_running(4)
        await made.pause()
        await made.resume()
        await engine.wait_running(4)
        tasks, files = len(made.parts.tasks.live), open_files()
        for flap in range(200):
            if flap % 2 == 0:
                await engine.wait_running(4)
            report = await made.pause()
            assert report.clean
            await made.resume()
        await engine.wait_running(4)
        assert report.ticket == 201
        assert len(made.parts.tasks.live) <= tasks
        assert open_files() <= files + 8
        engine.answer = lambda _: Reply(tokens=1)
        engine.release(tokens=1)
        batch = await made.take(groups=4)
        assert batch["metrics"]["continued"] > 200
        assert all(len(group["samples"][0]["response_ids"]) <= 512 for group in batch["groups"])


async def test_cancelling_the_caller_of_pause_leaves_the_pause_alone() -> None:
    """The call ends as cancelled, at once; the pause goes on and gives its report to the next caller."""  # P14
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        pausing = made.start(made.service.pause())
        await engine.wait_aborts(1)
        pausing.cancel()
        await asyncio.wait({pausing})
        assert pausing.cancelled()
        assert made.service.state == "pausing"
        engine.lose_aborts = False
        assert (await made.pause()).ticket == 1


async def test_cancelling_takes_resumes_and_updates(tmp_path: Path) -> None:
    """Cancelling any public call propagates, and leaves what it was about to the service's own tasks."""  # P14
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await stuck(made, engine)
        taking = made.start(made.service.take_batch(0, 1, 30.0))
        pausing = made.start(made.pause())
        await engine.wait_aborts(1)
        resuming = made.start(made.service.resume())
        await engine.wait_aborts(2)
        for task in (taking, resuming):
            task.cancel()
        await asyncio.wait({taking, resuming})
        assert taking.cancelled()
        assert resuming.cancelled()
        engine.lose_aborts = False
        await pausing
        assert made.service.state == "paused"
        assert not made.parts.batches._takers
        updating = made.start(made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)}))
        await engine.wait_hits("/update_weights_from_disk", 1)
        updating.cancel()
        await asyncio.wait({updating})
        assert updating.cancelled()
        await made.until(lambda: made.service.status()["weight_version"] == 1)
        await made.resume(weight_version=1)
        engine.answer = lambda _: Reply(tokens=1)
        assert (await made.take())["groups"]


async def test_arguments_that_make_no_sense_change_nothing() -> None:
    """Unknown lanes, no lane, and deadlines that are none are refused before the gate is touched."""  # P35
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        for arguments in ({"lanes": ()}, {"lanes": ("tram",)}, {"deadline_s": 0.0}, {"deadline_s": float("nan")}):
            with pytest.raises(BadRequest):
                await made.service.pause(**arguments)
        with pytest.raises(BadRequest, match="mode"):
            await made.service.pause(mode="stop")
        with pytest.raises(BadRequest, match="kv"):
            await made.service.pause(mode="keep", kv="some")
        with pytest.raises(BadRequest, match="lanes"):
            await made.service.pause(mode="keep", lanes=("train",))
        assert made.service.state == "running"
        assert (engine.running, made.service.status()["ticket"]) == (1, 0)


async def test_a_lane_that_joins_at_the_report_is_drained_too() -> None:
    """Naming another lane while engines are counted closes it at once, and both are drained by the earlier deadline."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.loads = (1, 0)
        first = made.start(made.pause(20.0, lanes=("train",)))
        await engine.wait_hits("/v1/loads", 2)
        second = made.start(made.pause(0.4))
        await made.until(lambda: not made.parts.gate.is_open("eval"))
        assert await first is await second
        assert made.parts.pauses.drained == {"train", "eval"}
        engine.loads = None


async def test_only_the_ticket_a_running_pause_started_from_joins_it() -> None:
    """A pause of a second lane, begun while the first is paused, started from the current ticket and no older one."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(lanes=("train",))
        engine.loads = (1, 0)
        second = made.start(made.pause(0.4, lanes=("eval",)))
        await made.until(lambda: made.service.state == "pausing")
        with pytest.raises(Conflict):
            await made.service.pause(if_ticket=0)
        await second
        engine.loads = None
