"""The canned engines that benches measure against."""

import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from bench.bare import WIRES
from bench.canned import lmdeploy, sglang, vllm
from bench.canned.bodies import Bodies
from bench.canned.connection import Connection
from bench.canned.durations import durations
from bench.canned.engine import Engine
from rollout_svc.config import SamplingConfig
from rollout_svc.engines import DIALECTS, Endpoint, GenerateRequest, HttpTransport, Reply

SPOKEN = {"sglang": sglang, "vllm": vllm, "lmdeploy": lmdeploy}


def _body(dialect: str, tokens: int, finish: str) -> bytes:
    bodies = Bodies(SPOKEN[dialect].answer, response_tokens=16, vocab=100, weight_version="3")
    return bodies.body(tokens, finish, b"f" * 32, 128)


@pytest.mark.parametrize("dialect", SPOKEN)
def test_the_bare_client_reads_what_is_canned(dialect: str) -> None:
    """Floor and engine speak the same dialect: as many logprobs as ids, of the length that was asked for."""
    answer = orjson.loads(_body(dialect, 16, "length"))
    ids, logprobs = WIRES[dialect].read(answer)
    assert len(ids) == len(logprobs) == 16
    said = answer["usage"] if dialect == "vllm" else answer["meta_info"]
    assert (said["prompt_tokens"], said["completion_tokens"]) == (128, 16)
    assert said.get("total_tokens", 144) == 144


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@pytest.mark.parametrize("dialect", SPOKEN)
def test_the_service_reads_what_is_canned(dialect: str, finish: str) -> None:
    """A canned answer passes every check of its dialect."""
    completion = DIALECTS[dialect]().parse_generate(Reply(200, _body(dialect, 8, finish)))
    assert (len(completion.ids), completion.finish_reason) == (8, finish)
    if dialect != "lmdeploy":  # its answers name neither request nor weights
        assert completion.request_id == "f" * 32
        assert [(span.version, span.start, span.end) for span in completion.spans] == [(3, 0, 8)]


@asynccontextmanager
async def _engine(dialect: str) -> AsyncIterator[tuple[Engine, Endpoint]]:
    bodies = Bodies(SPOKEN[dialect].answer, response_tokens=16, vocab=100, weight_version="0")
    engine = Engine(bodies, duration_s=None, partial_tokens=3)
    SPOKEN[dialect].speak(engine)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0)
    try:
        yield engine, Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
    finally:
        server.close()


@pytest.mark.parametrize("name", SPOKEN)
async def test_a_canned_engine_is_taken_for_what_it_plays(name: str) -> None:
    """Its probe is answered; it is ready; what it holds ends by an abort of its wire id, and had its slot busy."""
    dialect, wire_id = DIALECTS[name](), uuid.uuid4().hex
    async with _engine(name) as (engine, endpoint), HttpTransport() as transport:
        replies = [await transport.control(endpoint, call, 5.0) for call in dialect.probe()]
        profile = dialect.parse_probe(replies)
        assert (profile.dialect, profile.logprobs) == (name, "raw")
        assert dialect.parse_ping(await transport.control(endpoint, dialect.ping(), 5.0)).ready
        request = GenerateRequest(wire_id, [1, 2, 3], 8, SamplingConfig(max_tokens=8))
        held = asyncio.create_task(transport.data(endpoint, dialect.generate(request)))
        while not engine.live:  # noqa: ASYNC110 - the engine sends no event, and the next turns bring the request
            await asyncio.sleep(0)
        for call in dialect.abort([wire_id]):
            dialect.parse_done(await transport.control(endpoint, call, 5.0))
        completion = dialect.parse_generate(await held)
        assert (len(completion.ids), completion.finish_reason) == (3, "abort")
        assert (engine.live, engine.counts["aborted"]) == ({}, 1)
        assert engine.busy_s() > 0


@pytest.mark.parametrize("spread", ["fixed", "uniform", "lognormal"])
def test_durations_have_the_mean_they_are_given(spread: str) -> None:
    """However they are spread: the load is the same."""
    draw = durations(spread, 2.0, random.Random(5))
    assert statistics.fmean(draw() for _ in range(20_000)) == pytest.approx(2.0, rel=0.03)
