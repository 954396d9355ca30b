"""What a pause can run into: each thing that may be under way at the moment it is asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.gate import Mode
from rollout_svc.workers.worker import WorkerState
from tests.support.bell import WAIT_S
from tests.support.fake_sglang import FakeSGLang, Hang
from tests.support.loops import Tidy
from tests.support.stage import Stage, stage

MODES: tuple[Mode, ...] = ("abort", "wait", "keep")


class Slow:
    """A tokenizer that encodes when it is told to."""

    cheap = False

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.encoding = 0

    def encode(self, text: str) -> list[int]:
        """Wait in the tokenizer's thread."""
        self.encoding += 1
        assert self.go_on.wait(WAIT_S)
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Turn bytes into text."""
        return bytes(ids).decode()

    def apply_chat_template(self, *_: Any) -> list[int]:
        """There is none."""
        raise NotImplementedError

    def render(self, *_: Any, asking: bool) -> str:
        """There is none."""
        raise NotImplementedError

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def encode_rendered(self, text: str) -> list[int]:
        """There is none."""
        raise NotImplementedError


@pytest.mark.parametrize("mode", MODES)
async def test_a_spawn_under_way(mode: Mode) -> None:
    """A prompt that is being encoded as the gate closes starts nothing, and is the first one after resume."""  # P9
    tokenizer = {"path": "bytes"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, tokenizer=tokenizer) as made:
        slow = Slow()
        made.service.prepared.codec.tokenizer = slow
        await made.push([{"id": "a", "text": "hello"}])
        await encoding(slow)
        assert (await made.pause(2.0, mode=mode)).clean
        slow.go_on.set()
        await made.until(lambda: made.parts.producer.waiting == "gate_closed")
        assert (made.groups("admitted"), engine.requests) == (0, [])
        await made.resume()
        await engine.wait_running(1)
        assert made.groups("admitted") == 1


async def encoding(slow: Slow) -> None:
    """Wait for the tokenizer's thread, which rings no bell."""
    async with asyncio.timeout(WAIT_S):
        while not slow.encoding:
            await asyncio.to_thread(lambda: None)


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_request_its_engine_has_not_accepted_yet(mode: Mode) -> None:
    """An abort that overtakes its request does nothing; the next one finds it."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.script("/generate", Hang())
        await made.push(1)
        await engine.wait_hits("/generate", 1)
        pausing = made.start(made.pause(4.0, mode=mode))
        await engine.wait_aborts(1)
        engine.heal("/generate")  # it arrives now
        report = await pausing
        assert (report.clean, engine.running, report.workers["w0"].answered) == (True, 0, 1)
        assert len(engine.aborts) >= 2


async def test_a_freeze_that_overtakes_its_request() -> None:
    """A request that arrives at a frozen engine waits at its door, and runs after resume."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.script("/generate", Hang())
        await made.push(1)
        await engine.wait_hits("/generate", 1)
        assert (await made.pause(4.0, mode="keep")).clean
        engine.heal("/generate")
        await engine.until(lambda: engine.blocked == 1, "at the door")
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]


async def test_a_clean_up_that_takes_long() -> None:
    """An agent that cleans up beyond the deadline is named, fenced, and not cancelled a second time."""  # P8 P14
    agent = {"path": "tests.support.loops:Tidy"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=agent) as made:
        loop: Tidy = made.agent
        await engine.wait_running(1)
        report = await made.pause(0.5)
        [left] = report.abandoned
        assert (left.worker, report.workers["w0"].abandoned) == (None, 0)
        [sample] = made.live_groups()[0].samples
        assert (str(sample.status), len(sample.response_ids)) == ("ABORTED", 3)
        loop.go_on.set()
        await made.until(lambda: not made.parts.rollouts.stragglers)
        assert loop.ended == [left.sample_id]
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        [record] = (await made.take())["groups"][0]["samples"]
        assert record["response_ids"][-1] == 9
        assert len(record["response_ids"]) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_a_shutdown(mode: Mode) -> None:
    """A service that is stopped while it pauses gives the pause its report, and ends."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.pause(1.0, mode=mode))
        await made.until(lambda: made.service.state == "pausing")
        await made.service.stop()
        assert (await pausing).ticket == 1
        with pytest.raises(NotNow):
            await made.service.pause()


async def test_a_shutdown_does_not_wait_for_a_pause_that_has_hours() -> None:
    """A stop joins the pause under way: what runs there is ended within the stop's own deadline."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        pausing = made.start(made.pause(3600.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        async with asyncio.timeout(5.0):
            await made.service.stop()
            report = await pausing
        assert (report.ticket, report.mode, report.clean) == (1, "abort", True)
        assert report.workers["w0"].answered == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_batch_that_is_being_taken(mode: Mode) -> None:
    """A take that waits goes on waiting over a pause, and is served from what is ready in it."""  # P22
    two = {"train_batch_size": 2}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2, trainer=two) as made:
        await engine.wait_running(2)
        taking = made.start(made.take(groups=1))
        pausing = made.start(made.pause(4.0, mode=mode))
        await made.until(lambda: made.service.state == "pausing")
        if mode == "abort":
            assert (await pausing).clean
            assert not taking.done()
            await made.resume()
            await engine.wait_running(2)
        engine.release(tokens=[1])
        if mode == "keep":
            await pausing
            await made.resume()
        assert (await taking)["groups"]
        await pausing


async def ready_for_restart(made: Stage, engine: FakeSGLang) -> None:
    """Bring a worker into quarantine: its engine runs on what was cancelled."""
    engine.lose_aborts = True
    await engine.wait_running(1)
    assert not (await made.pause(0.5)).clean
    assert made.worker().state is WorkerState.QUARANTINED


async def test_a_quarantined_worker_comes_back_by_a_restart() -> None:
    """A new process runs nothing: once it has confirmed the weights of the fleet it is in traffic again."""  # P9 P19
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await ready_for_restart(made, engine)
        await engine.restart()
        engine.lose_aborts = False
        await made.resume()
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE)
        assert made.worker().version == 0
        await engine.wait_running(1)
