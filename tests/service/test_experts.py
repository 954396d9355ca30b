"""Routed experts through a whole service: asked for, joined over cuts, owned until the ack; never of evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollout_svc.accounts import accounts_of
from rollout_svc.events import CapabilityWithdrawn, SampleFailed
from rollout_svc.observe.metrics import Metrics
from rollout_svc.sample import Sample
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang, Status
from tests.support.fake_sglang import Reply as Answer
from tests.support.lifted import LiftingTransport
from tests.support.loops import TOOL_IDS
from tests.support.routing import TINY
from tests.support.stage import PROMPT, Stage, lines, stage
from tests.support.threads import HandThreads

WANTED = {"enabled": True, "layers": TINY.layers, "top_k": TINY.top_k, "num_experts": 8, "moe_layers": [1, 2, 3]}


@asynccontextmanager
async def experts(
    *, stream: bool = False, notices: bool = True, **sections: Any
) -> AsyncIterator[tuple[FakeSGLang, Stage]]:
    """A service whose one engine can tell its routed experts; `notices`: a client that leaves ends its generation."""
    engine = FakeSGLang(weight_version="0", experts=TINY, handler_cancellation=notices)
    sections.setdefault("experts", WANTED)
    async with engine:
        worker = {"url": engine.url, "stream": stream}
        async with stage(worker, transport=LiftingTransport, **sections) as made:
            yield engine, made


def asked(engine: FakeSGLang) -> list[int | None]:
    """From which row each generation asked; None: it asked for none."""
    bodies = [call.body for call in engine.requests]
    return [body["routed_experts_start_len"] if body.get("return_routed_experts") else None for body in bodies]


def check(sample: Sample) -> None:
    """Its routing is that of its tokens, whole."""
    assert sample.experts is not None
    assert np.array_equal(sample.experts.read(), TINY.rows(sample.prompt_ids + sample.response_ids))


def one(made: Stage) -> Sample:
    """The one sample there is."""
    [group] = made.live_groups()
    [sample] = group.samples
    return sample


async def test_a_sample_owns_its_routing_until_the_ack() -> None:
    """In status, in the metrics and in the buffer's bytes while it is there; gone with the ack."""  # P27
    async with experts(pushed=1) as (engine, made):
        await engine.wait_running(1)
        engine.release(tokens=[7, 8, 9])
        batch = await made.take()
        sample = one(made)
        check(sample)
        assert sample.experts is not None
        size = 6 * 3 * 2
        assert made.service.status()["tensors"] == {"experts": {"handles": 1, "bytes": size, "lost": 0}}
        assert made.service.status()["buffer"]["bytes"] == len(sample.packed or b"") + size
        accounts = accounts_of(made.parts)  # a tensor is in one account
        assert (accounts["handles.experts"], accounts["replay_buffer"]) == (size, len(sample.packed or b""))
        body, _ = Metrics(made.service.bus, made.service.status).render()
        for line in ('handles{kind="experts"} 1.0', f'bytes{{kind="experts"}} {size}.0', "handles_lost_total 0.0"):
            assert f"rollout_tensor_{line}" in body.decode()
        await made.service.ack(batch["batch_id"])
        assert sample.rows_missing == 6
        assert not made.service.status()["tensors"]


async def test_a_continued_sample_has_one_history() -> None:
    """Rows from the first token on, each asked for once, over a pause and other weights."""  # P27
    async with experts(pushed=1) as (engine, made):
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 3)
        await made.pause()
        assert one(made).rows_missing == 0
        await made.service.update_weights(1, {"kind": "disk", "path": "/weights/1"})
        assert made.parts.handles.live["experts"].handles == 1
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        await made.take(step=1)
        check(one(made))
        assert asked(engine) == [0, 6]  # four tokens of the prompt and three made, less the last


async def test_a_streamed_cut_heals() -> None:
    """Tokens that came without their rows stay; the next call asks for those too."""  # P10
    async with experts(stream=True, pushed=1) as (engine, made):
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 3)
        engine.lose_aborts = True
        await made.pause(1.0)
        sample = one(made)
        assert (len(sample.response_ids), sample.experts, sample.rows_missing) == (3, None, 6)
        engine.lose_aborts = False
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        await made.take()
        check(one(made))
        assert asked(engine) == [0, 0]


async def test_a_whole_stream_whose_rows_did_not_come_has_not_come() -> None:
    """The last chunk was there, and a pause ended the call while its rows were read: it is generated again."""  # P27
    threads = HandThreads()
    async with experts(stream=True, pushed=1, threads=threads) as (engine, made):
        await engine.wait_running(1)
        engine.release(tokens=[7, 8, 9])
        await threads.submitted.wait()
        report = await made.pause(0.5)
        assert report.workers["w0"].cancelled == 1
        assert report.clean
        threads.at_once = True
        threads.work()
        sample = one(made)
        assert (str(sample.status), sample.response_ids, sample.failures) == ("ABORTED", [], 0)
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        await made.take()
        check(one(made))


async def test_an_answer_whose_rows_are_read_is_not_aborted() -> None:
    """Where requests are aborted by id the second abort closes a call: not one that has its answer."""  # P8 P10
    threads = HandThreads()
    engine = FakeSGLang(weight_version="0", experts=TINY, handler_cancellation=True)
    async with engine:
        worker = {"url": engine.url, "exclusive": False}
        async with stage(worker, transport=LiftingTransport, pushed=1, experts=WANTED, threads=threads) as made:
            await engine.wait_running(1)
            engine.release(tokens=[7, 8])
            await threads.submitted.wait()
            pause = made.start(made.pause(2.0))
            await asyncio.sleep(0.5)  # aborts are repeated after 0.05 s, 0.1 s, …
            threads.work()
            tally = (await pause).workers["w0"]
            assert (tally.answered, tally.cancelled) == (1, 0)
            sample = one(made)
            assert (sample.response_ids, sample.resume_at) == ([7, 8], "judge")
            check(sample)


async def test_a_cut_answer_whose_rows_are_still_read_keeps_its_tokens() -> None:
    """The engine answered the abort, and the pause ended the call while its rows were read: no token is lost."""  # P10
    threads = HandThreads()
    async with experts(pushed=1, threads=threads) as (engine, made):
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 3)
        report = await made.pause(0.5)
        assert report.clean
        sample = one(made)
        assert (str(sample.status), len(sample.response_ids), sample.rows_missing) == ("ABORTED", 3, 6)
        threads.at_once = True
        threads.work()
        await made.until(lambda: not made.parts.handles.live)
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        await made.take()
        check(one(made))
        assert asked(engine) == [0, 0]


async def test_the_rows_of_a_tool_come_with_the_next_turn() -> None:
    """What an agent puts in between is routed when the engine reads it."""
    tool = {"path": "tests.support.loops:ToolUser"}
    async with experts(pushed=1, agent=tool) as (engine, made):
        await engine.wait_running(1)
        made.agent.go_on.set()
        engine.release(tokens=[7, 8])
        await engine.wait_running(1)
        engine.release(tokens=[9])
        await made.take()
        check(one(made))
        assert asked(engine) == [0, 5]
        assert list(TOOL_IDS) == one(made).response_ids[2:-1]


async def test_an_evaluation_between_changes_nothing() -> None:
    """It asks for none, whatever anybody's settings say, and training asks after it as before."""  # P28
    async with experts(pushed=1) as (engine, made):
        await engine.wait_running(1)
        engine.release(tokens=[7])
        await made.until(lambda: made.groups("ready") == 1)
        settings = made.service.prepared.runtimes["t"].sampling
        before = settings.model_dump()
        for laid_over in (None, {"return_routed_experts": True}, {"return_routed_experts": False}):
            evaluation = made.start(made.evaluate(1, sampling=laid_over))
            await engine.wait_running(1)
            engine.release(tokens=[7])
            await evaluation
        await made.push(1, first=1)
        await engine.wait_running(1)
        engine.release(tokens=[7])
        await made.until(lambda: made.groups("ready") == 2)
        assert asked(engine) == [0, None, None, None, 0]
        assert all("routed" not in key for call in engine.requests[1:4] for key in call.body)
        assert made.service.prepared.runtimes["t"].sampling is settings
        assert settings.model_dump() == before


async def test_a_task_that_wants_none_has_none() -> None:
    """The global setting alone asks nobody."""
    async with experts(pushed=1, sampling={"max_tokens": 16, "return_routed_experts": False}) as (engine, made):
        await engine.wait_running(1)
        engine.release(tokens=[7])
        await made.take()
        assert one(made).experts is None
        assert asked(engine) == [None]


async def test_whoever_forgets_them_gets_no_more_and_the_sample_is_counted() -> None:
    """Asked for and absent: the sample failed, the worker is out, said once."""  # P4
    async with experts(pushed=2, producer={"max_attempts": 3}) as (engine, made):
        await engine.wait_running(2)
        engine.lose_experts = True
        engine.release(tokens=[7])
        engine.release(tokens=[7])
        await made.until(lambda: len(made.of(SampleFailed)) == 2)
        assert {event.reason for event in made.of(SampleFailed)} == {"experts_missing"}
        assert len(made.of(CapabilityWithdrawn)) == 1
        assert "experts" not in made.worker().capabilities
        assert not made.parts.handles.live


@pytest.mark.parametrize("frozen", [True, False])
async def test_whoever_comes_after_one_that_died_in_quarantine_is_believed(frozen: bool) -> None:
    """Frozen it did not go on, or it was never empty: nobody lets it in, but somebody sees it gone."""  # P4 P19
    async with experts(pushed=2, notices=frozen, producer={"max_attempts": 3}) as (engine, made):
        await engine.wait_running(2)
        if frozen:
            await made.pause(5.0, mode="keep")
        engine.lose_experts = engine.lose_aborts = True
        engine.release(engine.calls("running")[0], tokens=[7])
        await made.until(lambda: bool(made.of(CapabilityWithdrawn)))
        if frozen:
            engine.script("/continue_generation", Status(503), times=None)
        assert not (await made.pause(0.3)).clean
        await made.resume()
        worker = made.worker()
        assert (worker.state, list(worker.withdrawn)) == (WorkerState.QUARANTINED, ["experts"])
        await engine.kill()
        async with asyncio.timeout(10):
            while "connection" not in worker.reason:  # noqa: ASYNC110 - what changes a reason rings no bell
                await asyncio.sleep(0.01)
        engine.heal("/continue_generation")
        engine.lose_experts = engine.lose_aborts = False
        await engine.restart()
        await engine.wait_running(1)
        assert "experts" in worker.capabilities


async def test_what_does_not_fit_fails_for_good() -> None:
    """A history that cannot be read is a failure like any other, and leaves nothing alive."""  # P27 P28
    odd = WANTED | {"num_experts": 2, "top_k": 2}
    async with experts(pushed=1, experts=odd, producer={"max_attempts": 2}) as (engine, made):
        for _ in range(2):
            await engine.wait_running(1)
            engine.release(tokens=[7])
            await made.until(lambda: not engine.busy)
        await made.until(lambda: made.groups("failed") == 1)
        assert {event.reason for event in made.of(SampleFailed)} == {"experts_invalid"}
        assert not made.parts.handles.live


async def test_an_answer_of_other_weights_leaves_nothing() -> None:
    """It was restarted in silence: what it answers is refused, and the rows it brought are released."""  # P24 P27
    async with experts(pushed=1) as (engine, made):
        await engine.wait_running(1)
        engine.release(fate=Answer([7, 8], "stop", weight_version="9"))
        await made.until(lambda: made.parts.handles.made["experts"] == 1 and not made.parts.handles.live)
        assert not made.parts.handles.lost


@pytest.mark.parametrize("late", [False, True])
async def test_rows_that_are_read_over_a_pause(late: bool) -> None:
    """Read in time the answer counts, as late as it is; else its call is one that was not answered."""  # P3 P27
    threads = HandThreads()
    async with experts(pushed=1, threads=threads) as (engine, made):
        await engine.wait_running(1)
        engine.release(tokens=[7, 8])
        await threads.submitted.wait()
        pause = made.start(made.pause(1.0))
        await made.until(lambda: made.service.state == "pausing")
        if not late:
            threads.work()
        report = await pause
        tally = report.workers["w0"]
        assert (tally.answered, tally.cancelled, report.clean) == ((0, 1, True) if late else (1, 0, True))
        threads.at_once = True
        threads.work()
        sample = one(made)
        assert (str(sample.status), sample.resume_at) == ("ABORTED", "generate" if late else "judge")
        assert bool(sample.response_ids) is not late
        await made.until(lambda: (not late) == bool(made.parts.handles.live))
        await made.resume()
        if late:
            await engine.wait_running(1)
            engine.release(tokens=[7, 8])
        await made.take()
        check(one(made))


async def test_a_stop_releases_what_is_left() -> None:
    """Ready, leased, unfinished: `stage` looks whether anything is alive."""  # P27
    async with experts(trainer={"train_batch_size": 4}) as (engine, made):
        engine.answer = lambda _: Answer([7, 8], "stop")
        await made.push(3)
        await made.take()
        await made.until(lambda: made.groups("ready") == 2)
        engine.answer = None
        await made.push(lines(1, first=9))
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 2)
        await made.pause()
        assert made.groups("aborted") == 1
        assert made.parts.handles.live["experts"].handles == 4
        assert len(PROMPT) == 3
