"""Workers with `stream: true`: tokens that were received stay, however their call ends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import orjson
import pytest

from rollout_svc.engines import Call, Endpoint, HttpTransport, Reply, SGLangDialect, StreamReader
from rollout_svc.engines.sglang_stream import SGLangReader
from rollout_svc.errors import WorkerFailure
from rollout_svc.events import SampleFailed
from tests.support.fake_sglang import Cut, FakeSGLang
from tests.support.fake_sglang import Reply as Answer
from tests.support.loops import TOOL_IDS
from tests.support.stage import PROMPT, stage

TOKEN = orjson.dumps(
    {
        "output_ids": [5],
        "meta_info": {
            "completion_tokens": 1,
            "finish_reason": None,
            "output_token_logprobs": [[-1.0, 5, 0]],
            "weight_version": "0",
        },
    }
)


class Heard(SGLangDialect):
    """The dialect, telling when an event has reached its reader: what a connection that breaks may no longer carry."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def reader(self) -> SGLangReader:
        """A reader that tells."""
        event = self.event

        class Reader(SGLangReader):
            def feed(self, payload: bytes) -> None:
                super().feed(payload)
                event.set()

        return Reader(super().reader()._parse)


def streaming(*engines: FakeSGLang) -> list[dict[str, Any]]:
    """These engines as workers that stream."""
    return [{"url": engine.url, "stream": True} for engine in engines]


async def test_a_streamed_answer_is_an_answer() -> None:
    """A batch is the same whether its answers came whole or in parts."""
    async with FakeSGLang(weight_version="0") as engine, stage(*streaming(engine), pushed=1) as made:
        await engine.wait_running(1)
        [call] = engine.calls("running")
        assert call.body["stream"] is True
        engine.advance(call, 2)
        engine.release(tokens=[7, 8, 9])
        [record] = (await made.take())["groups"][0]["samples"]
        assert (record["response_ids"], record["finish_reason"]) == ([7, 8, 9], "stop")
        assert record["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]


async def test_a_cancelled_call_keeps_the_tokens_it_had() -> None:
    """The engine does not listen: the call is closed at its rung, and goes on from what had come."""  # P10
    engine = FakeSGLang(weight_version="0", handler_cancellation=True)
    async with engine, stage(*streaming(engine), pushed=1) as made:
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 3)
        engine.lose_aborts = True
        report = await made.pause(1.0)
        tally = report.workers["w0"]
        assert (tally.in_flight, tally.answered, tally.cancelled) == (1, 0, 1)
        [sample] = made.live_groups()[0].samples
        assert (str(sample.status), len(sample.response_ids)) == ("ABORTED", 3)
        had = list(sample.response_ids)
        engine.lose_aborts = False
        await made.resume()
        await engine.wait_running(1)
        again = engine.calls("running")[0]
        assert again.prompt_ids == [*PROMPT, 0, *had]
        assert again.max_new_tokens == 16 - 3
        engine.release(tokens=[9])
        [record] = (await made.take())["groups"][0]["samples"]
        assert record["response_ids"] == [*had, 9]


@pytest.mark.parametrize("how", ["cut", "killed"])
async def test_what_a_lost_engine_had_sent_moves_with_its_sample(how: str) -> None:
    """A connection that breaks in a stream costs nothing that was received: it goes on from there."""  # P19
    one, other = FakeSGLang(weight_version="0"), FakeSGLang(weight_version="0")
    async with one, other, stage(*streaming(one, other)) as made:
        made.worker(0).dialect = heard = Heard()
        await made.push(1)
        await one.wait_running(1)
        one.advance(one.calls("running")[0], 4)
        await heard.event.wait()
        if how == "cut":
            one.release(fate=Cut(Answer(tokens=5)))
        else:
            await one.kill()
        waits = [made.start(engine.wait_running(1)) for engine in (one, other)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        [(engine, again)] = [(engine, call) for engine in (one, other) for call in engine.calls("running")]
        assert len(again.prompt_ids) == len(PROMPT) + 1 + 4
        assert (how, engine) != ("killed", one)
        engine.release(tokens=[9])
        [record] = (await made.take())["groups"][0]["samples"]
        assert len(record["response_ids"]) == 5
        assert record["loss_mask"] == [1] * 5


class Breaking(HttpTransport):
    """Carries one token of an answer to a prompt with 66 in it, and breaks."""

    __slots__ = ("broken",)

    def __init__(self) -> None:
        super().__init__()
        self.broken = 0

    def broke_since(self, before: int) -> bool:
        """Whether it broke more often than that."""
        return self.broken > before

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> Reply:
        """Break, or carry."""
        if 66 in orjson.loads(call.body or b"")["input_ids"]:
            reader.feed(TOKEN)
            self.broken += 1
            raise WorkerFailure("connection", "it broke", hard=True, accepted=True)
        return await super().stream(endpoint, call, reader)


async def test_a_poison_prompt_that_streams_fails_for_good() -> None:
    """What it brings before it breaks its engine is no progress that excuses it for ever."""  # P20
    engine = FakeSGLang(weight_version="0")
    engine.answer = lambda _: Answer(tokens=1)
    async with engine, stage(*streaming(engine), transport=Breaking, producer={"max_attempts": 1}) as made:
        transport = made.parts.transport
        assert isinstance(transport, Breaking)
        await made.push(1, first=66)
        while transport.broken < 4:
            before = transport.broken
            await made.push(1, first=100 + before)
            batch = await made.take(groups=1)
            await made.service.ack(batch["batch_id"])
            await made.bell.until(partial(transport.broke_since, before), "it breaks again", 10.0)
        await made.until(lambda: made.groups("failed") == 1)
        assert [failed.reason for failed in made.of(SampleFailed) if failed.final] == ["poison"]


class Curtailing(HttpTransport):
    """Carries a first answer to its last token and its finish reason, and breaks before the stream has ended."""

    __slots__ = ("carried",)

    def __init__(self) -> None:
        super().__init__()
        self.carried = 0

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> Reply:
        """Break the first, carry the others."""
        self.carried += 1
        if self.carried == 1:
            reader.feed(TOKEN.replace(b"null", b'{"type":"stop","matched":5}', 1))
            raise WorkerFailure("connection", "it broke", hard=True, accepted=True)
        return await super().stream(endpoint, call, reader)


async def test_a_stop_that_came_is_a_stop() -> None:
    """A turn whose stop was received is whole, although its connection broke: nothing is generated past it."""  # P6
    path = {"path": "tests.support.loops:ToolUser"}
    engine = FakeSGLang(weight_version="0")
    async with engine, stage(*streaming(engine), transport=Curtailing, pushed=1, agent=path) as made:
        made.agent.go_on.set()
        await engine.wait_running(1)
        [second] = engine.calls("running")
        assert second.prompt_ids == [*PROMPT, 0, 5, *TOOL_IDS]
        engine.release(tokens=[9])
        [record] = (await made.take())["groups"][0]["samples"]
        assert record["response_ids"] == [5, *TOOL_IDS, 9]
