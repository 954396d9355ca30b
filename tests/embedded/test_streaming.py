"""Streams over real sockets: what each event holds, how a stream ends, and what it takes along when it is left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_svc.embedded.model import build, save_weights
from tests.embedded.helpers import ABORTED, ABORTED_QUEUED, CONFIG, PATIENCE_S, Served, served, uninterrupted_ids

DONE = "[DONE]"


def body(rid: str, limit: int = 16, **top: Any) -> dict[str, Any]:
    """The request of `Served.generate`, as a stream."""
    settings = {"max_new_tokens": limit, "sampling_seed": 0, "ignore_eos": True}
    sent = {"rid": rid, "input_ids": [1, 2, 3], "sampling_params": settings, "return_logprob": True, "stream": True}
    return sent | top


class Stream:
    """One stream under way."""

    def __init__(self, engine: Served, rid: str, limit: int = 16, **top: Any) -> None:
        self._call = engine.session.post("/generate", json=body(rid, limit, **top))
        self._response: aiohttp.ClientResponse | None = None

    async def event(self) -> Any:
        """Read the next event: decoded, `[DONE]`, or None at the end of the body."""
        async with asyncio.timeout(PATIENCE_S):
            if self._response is None:
                self._response = await self._call
                assert self._response.status == 200
                assert self._response.content_type == "text/event-stream"
            line = (await self._response.content.readline()).decode()
            if not line:
                return None
            assert line.startswith("data: ")
            assert await self._response.content.readline() == b"\n"
        data = line.removeprefix("data: ").strip()
        return data if data == DONE else json.loads(data)

    async def rest(self) -> list[Any]:
        """Read all that is left, to the end of the body."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    def leave(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._call.close()


@asynccontextmanager
async def begun(engine: Served, rid: str = "s", limit: int = 16) -> AsyncIterator[tuple[Stream, Any]]:
    """A stream that is running, and its first event, of two tokens."""
    stream = Stream(engine, rid, limit)
    before = len(engine.scheduler.batch.jobs)
    first = asyncio.create_task(stream.event(), name=f"first:{rid}")
    await engine.queued(before + 1)
    await engine.step()
    try:
        yield stream, await first
    finally:
        stream.leave()


async def test_events_come_as_tokens_are_made_and_hold_all_so_far() -> None:
    """After every step there is an event with all ids, text and log-probabilities; then the answer, then `[DONE]`."""
    whole = uninterrupted_ids(6)
    async with served() as engine, begun(engine, limit=6) as (stream, first):
        events = [first]
        for _ in range(3):
            await engine.step()
            events.append(await stream.event())
        assert [event["output_ids"] for event in events] == [whole[:count] for count in (2, 3, 4, 5)]
        for event in events:
            meta = event["meta_info"]
            assert (meta["id"], meta["finish_reason"], meta["prompt_tokens"]) == ("s", None, 3)
            assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
            assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == len(event["output_ids"])
            assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(event["output_ids"])}]
        assert "e2e_latency" not in first["meta_info"]
        await engine.step()
        last, done = await stream.rest()
        assert (last["output_ids"], last["meta_info"]["finish_reason"]) == (whole, {"type": "length", "length": 6})
        assert done == DONE
        engine.assert_idle()


async def test_the_last_event_is_the_answer_of_a_plain_request() -> None:
    """But for the time it took, streamed and plain requests are answered alike."""
    async with served(is_open=True) as engine:
        events = await Stream(engine, "same", limit=40).rest()
        _, plain = await engine.generate("same", limit=40)
        for one in (events[-2], plain):
            del one["meta_info"]["e2e_latency"]
        assert (events[-2], events[-1]) == (plain, DONE)
        sparse = await Stream(engine, "sparse", return_logprob=False).rest()
        assert all("output_token_logprobs" not in event["meta_info"] for event in sparse[:-1])
        engine.assert_idle()


async def test_many_streams_grow_without_gaps() -> None:
    """Under load events may stand for several tokens; each extends the one before, and all end whole."""
    whole = uninterrupted_ids(60)
    async with served(max_running=8, is_open=True) as engine:
        streams = await asyncio.gather(*(Stream(engine, f"s{index:02}", limit=60).rest() for index in range(24)))
        for events in streams:
            counts = [len(event["output_ids"]) for event in events[:-1]]
            assert counts == sorted(counts)
            assert all(event["output_ids"] == whole[: len(event["output_ids"])] for event in events[:-1])
            assert (events[-2]["output_ids"], events[-1]) == (whole, DONE)
        engine.assert_idle()


async def test_an_abort_ends_a_stream_with_what_there_is() -> None:
    """The last chunk has the abort reason, running or queued, and `[DONE]` follows."""
    async with served(max_running=1) as engine, begun(engine) as (running, first):
        queued = asyncio.create_task(Stream(engine, "queued").rest(), name="queued")
        await engine.queued(2)
        await engine.call("/abort_request", {"rid": "s"})
        last, done = await running.rest()
        assert (last["meta_info"]["finish_reason"], last["output_ids"], done) == (ABORTED, first["output_ids"], DONE)
        await engine.call("/abort_request", {"rid": "queued"})
        last, done = await queued
        assert (last["meta_info"]["finish_reason"], last["output_ids"], done) == (ABORTED_QUEUED, [], DONE)
        engine.assert_idle()


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
async def test_a_client_that_leaves_its_stream_is_dropped(mode: str | None) -> None:
    """Its row is free at once, frozen or not; so is the place of one that leaves at the door."""
    async with served() as engine, begun(engine) as (stream, _):
        if mode is not None:
            await engine.call("/pause_generation", {"mode": mode})
            late = asyncio.create_task(Stream(engine, "late").rest(), name="late")
            await engine.until(lambda: engine.engine.door.waiting == 1)
            late.cancel()
            await engine.until(lambda: engine.engine.door.waiting == 0)
        stream.leave()
        await engine.queued(0)
        await engine.until(lambda: engine.engine.door.inside == 0)
        await engine.call("/continue_generation", {})
        engine.assert_idle()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_stream_goes_on_over_a_freeze_and_new_weights(mode: str, tmp_path: Path) -> None:
    """Nothing is sent while frozen; afterwards events tell both versions, each over its own tokens. # P7."""
    save_weights(build(CONFIG, 99), tmp_path)
    async with served() as engine, begun(engine, limit=4) as (stream, _):
        await engine.call("/pause_generation", {"mode": mode})
        update = {"model_path": str(tmp_path), "weight_version": "1"}
        assert (await engine.call("/update_weights_from_disk", update))[0] == 200
        await engine.call("/continue_generation", {})
        engine.scheduler.open()
        events = await stream.rest()
        spans = [{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 4}]
        assert events[-2]["meta_info"]["weight_versions"] == spans
        for event in events[:-1]:
            made = len(event["output_ids"])
            told = event["meta_info"]["weight_versions"]
            assert (told[0], told[-1]["end"]) == (spans[0], made)
        engine.assert_idle()


async def test_errors_before_the_first_byte_are_plain() -> None:
    """Bad bodies, ids in flight and a dead engine are answered with their status, not with events."""
    async with served() as engine, begun(engine):
        status, answer = await engine.call("/generate", body("s"))
        assert (status, answer) == (400, {"error": {"message": "Duplicate request ID detected: s"}})
        status, answer = await engine.call("/generate", body("t", input_ids=[]))
        assert (status, list(answer)) == (400, ["error"])
        status, answer = await engine.call("/generate", body("t", stream="yes"))
        assert (status, answer["object"]) == (400, "error")
        assert "body.stream" in answer["message"]


async def test_a_fault_of_the_engine_ends_a_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once events were sent the fault is an event; before, it is a 503."""
    async with served() as engine, begun(engine) as (stream, _):

        def broken() -> None:
            raise ArithmeticError("bad step")

        monkeypatch.setattr(engine.scheduler, "step", broken)
        error, done = await stream.rest()
        assert (error["error"]["code"], done) == (503, DONE)
        assert "bad step" in error["error"]["message"]
        assert (await engine.call("/generate", body("next")))[0] == 503


async def test_closing_ends_a_stream_with_what_there_is() -> None:
    """A shutdown sends the partial answer and `[DONE]`."""
    async with served() as engine, begun(engine) as (stream, first):
        await engine.server.close()
        last, done = await stream.rest()
        assert (last["meta_info"]["finish_reason"], last["output_ids"], done) == (ABORTED, first["output_ids"], DONE)
