"""Stopping a real vLLM: what it was doing is kept, nothing goes on behind the service's back, and it can go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.vllm.models import TOLERANCE, Oracle
from tests.vllm.server import SLOTS, Server
from tests.vllm.site import (
    WAIT_S,
    answers,
    generated,
    look,
    met_half_done,
    prompt_ids,
    settled,
    sole,
    spans,
    vllm_stage,
)

LONG = 1200
"""Tokens of an answer that takes seconds."""
BURST = 40


def assert_greedy(oracle: Oracle, samples: list[dict[str, Any]], length: int, first: int = 0) -> None:
    """Each answer is whole, what the model says alone and undisturbed, and has its logprobs."""
    for number, sample in enumerate(samples, first):
        assert len(sample["response_ids"]) == length
        assert oracle.is_greedy("a", prompt_ids(number), sample["response_ids"])
        wanted = oracle.logprobs("a", prompt_ids(number), sample["response_ids"])
        assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_goes_on_to_the_same_text(engine: Server, oracle: Oracle, stream: bool) -> None:
    """Aborted mid-flight it keeps its tokens; continued, it ends as one that nobody stopped."""  # P6 P8 P9 P10
    async with vllm_stage(engine, max_tokens=LONG, stream=stream) as made:
        number, report = await met_half_done(made, engine, 100, lambda: len(sole(made).response_ids) < LONG)
        assert report.workers["w0"].residual in (0, None)
        kept = list(sole(made).response_ids)
        assert len(kept) >= 100
        await settled(engine)
        await made.resume()
        [sample] = await answers(made)
        assert sample["response_ids"][: len(kept)] == kept
        assert spans(sample) in ([(0, 0, LONG)], [(0, 0, len(kept)), (0, len(kept), LONG)])
        await made.push([{"id": "p100", "input_ids": prompt_ids(number), "ground_truth": 0}])
        [undisturbed] = await answers(made)
    assert sample["response_ids"] == undisturbed["response_ids"]
    assert_greedy(oracle, [sample], LONG, first=number)


async def test_queued_requests_are_aborted_too(engine: Server, oracle: Oracle) -> None:
    """Those in the engine's own queue end with no tokens, the running ones with theirs; all go on."""  # P9 P10
    length, count = 900, SLOTS + 4
    async with vllm_stage(engine, max_tokens=length, in_flight=count) as made:
        async with generated(engine, 2 * SLOTS):
            await made.push(count)
        report = await made.pause()
        assert report.clean
        kept = [len(sample.response_ids) for group in made.live_groups() for sample in group.samples]
        assert min(kept) == 0 < max(kept)
        await settled(engine)
        await made.resume()
        samples = await answers(made, count)
    assert_greedy(oracle, samples, length)


async def test_an_engine_that_is_shared_loses_our_requests_alone(engine: Server, oracle: Oracle) -> None:
    """By id each of ours is ended, running or queued; what another client runs there ends in its own time."""  # P9
    length, count = 900, SLOTS + 2
    body = {"token_ids": prompt_ids(99), "sampling_params": {"max_tokens": length, "ignore_eos": True}}
    shared: dict[str, Any] = {"worker": {"exclusive": False}, "pause": {"quarantine_s": 0.5}}
    async with vllm_stage(engine, max_tokens=length, in_flight=count, **shared) as made:
        other = asyncio.create_task(
            asyncio.to_thread(engine.call, "POST", "/inference/v1/generate", body), name="other"
        )
        async with generated(engine, 2 * SLOTS):
            await made.push(count)
        report = await made.pause()
        tally = report.workers["w0"]
        # Whoever is not answered by the second abort is hung up on; then nobody can say whose requests still run there.
        assert (tally.in_flight, tally.residual) == (tally.answered + tally.cancelled, None)
        assert len(report.abandoned) == tally.abandoned == tally.cancelled
        await look(lambda: sum(engine.load()) <= 1, "ours are gone")
        status, answer = await other
        [choice] = answer["choices"]
        assert (status, choice["finish_reason"], len(choice["token_ids"])) == (200, "length", length)
        await made.resume()
        samples = await answers(made, count)
    assert_greedy(oracle, samples, length)


async def test_a_burst_is_stopped_before_it_is_under_way(engine: Server, oracle: Oracle) -> None:
    """An abort of all that races 40 requests: in time, idle by the engine's own gauges, the books right."""  # P8 P9
    length = 100
    async with vllm_stage(engine, max_tokens=length, in_flight=BURST) as made:
        await made.push(BURST)
        async with asyncio.timeout(WAIT_S):
            while made.parts.pool.in_flight["train"] < BURST:  # noqa: ASYNC110 - a call that leaves rings no bell
                await asyncio.sleep(0)  # for a moment only: the first ends as the last leaves
        report = await made.pause()
        assert report.clean, report
        tally = report.workers["w0"]
        assert tally.in_flight == tally.answered + tally.cancelled
        assert tally.residual in (0, None)
        await settled(engine)
        await made.resume()
        samples = await answers(made, BURST)
        assert made.samples("failed") == 0
    assert_greedy(oracle, samples, length)


async def test_pauses_in_quick_succession_lose_nothing(engine: Server, oracle: Oracle) -> None:
    """Stopped and let go five times, each time a little further, the answers are the undisturbed ones."""  # P6 P11
    async with vllm_stage(engine, max_tokens=900) as made:
        await made.push(SLOTS)
        for _ in range(5):
            async with generated(engine, 10 * SLOTS):
                pass
            assert (await made.pause()).clean
            await made.resume()
        samples = await answers(made, SLOTS)
        assert made.samples("failed") == 0
    assert_greedy(oracle, samples, 900)


async def test_an_abort_over_a_freeze_takes_effect(engine: Server) -> None:
    """A frozen answer is aborted where it is; its tokens come back, and the engine is idle."""  # P9 P10
    async with vllm_stage(engine, max_tokens=LONG) as made:
        async with generated(engine, 50):
            await made.push(1)
        assert (await made.pause(mode="keep")).clean
        report = await made.pause(mode="abort")
        assert report.clean
        assert len(sole(made).response_ids) >= 50
        assert await asyncio.to_thread(engine.call, "GET", "/is_paused") == (200, {"is_paused": False})
        await settled(engine)


async def test_a_cancelled_stream_frees_its_slot(engine: Server) -> None:
    """The service stops while an answer streams: nothing runs in the engine afterwards."""  # P9
    async with vllm_stage(engine, max_tokens=LONG, stream=True) as made, generated(engine, 20):
        await made.push(2)
    await settled(engine)
