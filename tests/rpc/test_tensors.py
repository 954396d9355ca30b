"""Batches as tensors over HTTP: who gets them, what the clients make of them, and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp
import orjson
import pytest
import torch
from aiohttp import web

from rollout_svc.assembly import Parts
from rollout_svc.errors import NotNow, ServiceError
from rollout_svc.group import Group
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.reading import read_batch
from rollout_svc.rpc.blocking import SyncRolloutClient
from rollout_svc.rpc.client import RolloutClient
from rollout_svc.sample import SampleStatus
from rollout_svc.segment import Segment, VersionSpan
from tests.chaos.turns import TurnMeter
from tests.rpc.api import Caller, api
from tests.rpc.stub_service import Stub, serve
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.groups import make_prompt

JSON = "application/json"
STALL_S = 0.02
"""Longest turn of the loop while a batch is packed and sent, seconds."""
FETCH = """
import sys, urllib.request
headers = {"Content-Type": "application/json", "Accept": sys.argv[2]}
asked = urllib.request.Request(sys.argv[1] + "/v1/batches", sys.argv[3].encode(), headers)
with urllib.request.urlopen(asked) as answer:
    print(len(answer.read()))
"""


@pytest.fixture
async def call() -> AsyncIterator[Caller]:
    """Yield an API over one engine that answers at once."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: Reply(tokens=1 + call.prompt_ids[-1])
        async with api(engine, pushed=4, trainer={"prompt_repeat_k": 2}) as caller:
            yield caller


async def taken(call: Caller, accept: str | None, **body: Any) -> tuple[int, str, bytes]:
    """Take a batch, asking for a media type; status, media type and body."""
    sent = orjson.dumps({"step": 0, "groups": 4, "timeout_s": 10, **body})
    headers = {} if accept is None else {"Accept": accept}
    async with call.session.post(call.url + "/v1/batches", data=sent, headers=headers) as answer:
        return answer.status, answer.content_type, await answer.read()


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        (None, JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html", JSON),
        (JSON, JSON),
        (MEDIA_TYPE, MEDIA_TYPE),
        (MEDIA_TYPE.upper(), MEDIA_TYPE),
        (f"{JSON};q=0.5, {MEDIA_TYPE}", MEDIA_TYPE),
        (f"{JSON}, {MEDIA_TYPE};q=0.5", JSON),
        (f"{MEDIA_TYPE};q=0, */*", JSON),
        (f"{MEDIA_TYPE};q=much", JSON),
    ],
)
async def test_who_asks_for_tensors_gets_them(call: Caller, accept: str | None, media: str) -> None:
    """By name and not rather for JSON; whoever says nothing, or anything else, gets JSON."""
    status, kind, _ = await taken(call, accept)
    assert (status, kind) == (200, media)


async def test_both_forms_are_the_same_batch(call: Caller) -> None:
    """A step that was taken as JSON can be taken again as tensors: same lease, same samples, same numbers."""
    record = orjson.loads((await taken(call, None))[2])
    told = read_batch((await taken(call, MEDIA_TYPE))[2])
    assert told["batch_id"] == record["batch_id"]
    assert told["metrics"] == record["metrics"]
    samples = [sample for group in record["groups"] for sample in group["samples"]]
    assert [sample["sample_id"] for sample in told["samples"]] == [sample["sample_id"] for sample in samples]
    ids, mask = told["tensors"]["input_ids"], told["tensors"]["attention_mask"]
    for row, sample in enumerate(samples):
        assert ids[row][mask[row]].tolist() == sample["prompt_ids"] + sample["response_ids"]
    assert told["tensors"]["group_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_refusals_stay_json(call: Caller) -> None:
    """Whatever was asked for, what is refused is the one shape of errors."""
    for body, status, kind in (({"groups": 99}, 503, "not_enough"), ({"groups": 0}, 400, "bad_request")):
        answered, media, raw = await taken(call, MEDIA_TYPE, timeout_s=0, **body)
        assert (answered, media) == (status, JSON)
        assert orjson.loads(raw)["error"]["type"] == kind


async def test_a_caller_that_leaves_in_the_middle_harms_nobody(call: Caller) -> None:
    """Its connection ends, nothing is left behind, and the batch can be taken again."""
    fill(call.stage.parts, groups=4, samples=8, tokens=4000)
    await call.stage.until(lambda: call.stage.groups("ready") == 8)
    sent = {"step": 0, "groups": 8}
    async with aiohttp.ClientSession(read_bufsize=1024) as session:
        answer = await session.post(call.url + "/v1/batches", json=sent, headers={"Accept": MEDIA_TYPE})
        assert await answer.content.read(10)
        answer.close()
    assert len(read_batch((await taken(call, MEDIA_TYPE, groups=8))[2])["groups"]) == 8


async def test_the_clients_decode_to_torch(call: Caller) -> None:
    """`take_batch(tensors=True)`, async and blocking: torch tensors, and acks with the next take as ever."""
    async with RolloutClient(call.url) as client:
        first = await client.take_batch(0, 1, tensors=True)
        assert client.unacked == first["batch_id"]
        assert isinstance(first["tensors"]["input_ids"], torch.Tensor)
        assert first["tensors"]["rewards"].tolist() == [1.0, 1.0]
        second = await client.take_batch(1, 1, tensors=True)
        assert second["batch_id"] != first["batch_id"]
        assert call.stage.groups("consumed") == 1
        with pytest.raises(NotNow):
            await client.take_batch(2, 99, timeout_s=0.0, ack=None, tensors=True)
    with SyncRolloutClient(call.url) as blocking:
        third = await asyncio.to_thread(blocking.take_batch, 1, 1, tensors=True)
    assert third["batch_id"] == second["batch_id"]
    assert torch.equal(third["tensors"]["input_ids"], second["tensors"]["input_ids"])


async def test_an_answer_that_is_none_is_an_error() -> None:
    """A service that knows no tensors answers JSON: an error, and the batch is not counted as taken."""
    stub = Stub()
    runner = await serve(stub)
    async with RolloutClient(stub.url) as client:
        with pytest.raises(ServiceError, match="no batch of tensors"):
            await client.take_batch(0, 1, tensors=True)
        assert client.unacked is None
        assert stub.headers[-1]["Accept"] == MEDIA_TYPE

        async def broken(_: web.Request) -> web.Response:
            return web.Response(body=b"\x00" * 100, content_type=MEDIA_TYPE)

        stub.answers["/v1/batches"] = broken
        with pytest.raises(ServiceError, match="no batch of tensors"):
            await client.take_batch(0, 1, tensors=True)
    await runner.cleanup()


def fill(parts: Parts, *, groups: int, samples: int, tokens: int) -> None:
    """Put groups into the buffer as if they had been generated."""
    rng = Random(1)
    for number in range(groups):
        group = Group(
            group_id=f"g{number}",
            prompt=make_prompt(input_ids=list(range(200))),
            size=samples,
            lane="train",
            ledger=parts.ledger,
        )
        group.start()
        for sample in group.samples:
            attempt = sample.hand_out()
            ids, logprobs = ([rng.randrange(150_000) for _ in range(tokens)], [-rng.random() for _ in range(tokens)])
            sample.extend(attempt, Segment(ids, logprobs, (VersionSpan(0, 0, tokens),)))
            sample.transition(attempt, SampleStatus.GENERATED)
            sample.transition(attempt, SampleStatus.JUDGING)
            sample.grade(attempt, 1.0, {})
        group.finish(0.0)
        parts.buffer.put_ready(group)


@pytest.mark.parametrize("media", [MEDIA_TYPE, JSON])
async def test_a_large_batch_does_not_hold_the_loop(media: str) -> None:
    """64 groups of 8 samples of 2,048 tokens: no turn is longer than 20 ms, in the quietest of five."""
    async with api(trainer={"train_batch_size": 64}) as call:
        fill(call.stage.parts, groups=64, samples=8, tokens=2048)
        meter = TurnMeter(asyncio.get_running_loop())
        longest = []
        for _ in range(5):
            meter.reset()
            code = [sys.executable, "-c", FETCH, call.url, media, '{"step": 0, "groups": 64}']
            fetching = await asyncio.create_subprocess_exec(*code, stdout=asyncio.subprocess.PIPE)
            meter.reset()  # starting a process is a long turn of its own
            told, _ = await fetching.communicate()
            assert int(told) > 20 * 2**20
            longest.append(meter.longest_s)
            if longest[-1] < STALL_S:
                break
        assert min(longest) < STALL_S, longest
