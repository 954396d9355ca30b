"""Routed experts, from three engines in three encodings: the same rows of the same tokens, or none and no claim."""

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import (
    Completion,
    Dialect,
    Endpoint,
    EngineProfile,
    GenerateRequest,
    LMDeployDialect,
    SGLangDialect,
    VLLMDialect,
)
from rollout_svc.tensors.experts import RawExperts, decode
from rollout_svc.tensors.layouts import filled
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM
from tests.support.lifted import LiftingTransport
from tests.support.routing import TINY
from tests.support.sglang_wire import Reply

ENGINES: dict[str, tuple[Callable[..., Any], Callable[[], Dialect]]] = {
    "sglang": (FakeSGLang, SGLangDialect),
    "vllm": (FakeVLLM, VLLMDialect),
    "lmdeploy": (FakeLMDeploy, LMDeployDialect),
}
PROMPT = [3, 1, 4, 1, 5]
RUDE = {"return_routed_experts": True, "routed_experts_start_len": 1, "routed_experts_prompt_start": 1}


class Answer(NamedTuple):
    """What one call came to."""

    completion: Completion
    raw: RawExperts | None
    sent: dict[str, Any]


class Scene:
    """One engine, and a transport that reaches it."""

    def __init__(self, engine: Any, dialect: Dialect, transport: LiftingTransport) -> None:
        self.engine = engine
        self.dialect = dialect
        self._transport = transport

    async def profile(self) -> EngineProfile:
        """Register it."""
        endpoint = Endpoint(self.engine.url, None, None)
        replies = [await self._transport.control(endpoint, call, 5.0) for call in self.dialect.probe()]
        return self.dialect.parse_probe(replies)

    async def call(self, start: int | None, *, stream: bool = False, **rest: Any) -> Answer:
        """Generate."""
        request = GenerateRequest(f"{1:032x}", list(PROMPT), 8, SamplingConfig(), experts_from=start)
        for name, value in rest.items():
            setattr(request, name, value)
        endpoint, dialect = Endpoint(self.engine.url, None, None), self.dialect
        built = dialect.generate(request, stream=stream)
        if stream:
            reader = dialect.reader()
            reply = await self._transport.stream(endpoint, built, reader)
            completion = reader.completion()
        else:
            reply = await self._transport.data(endpoint, built)
            completion = dialect.parse_generate(reply)
        return Answer(completion, dialect.experts_of(reply.lifted, request), self.engine.requests[-1].body)


@pytest.fixture(params=sorted(ENGINES))
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """An engine that was started to return routed experts."""
    make, dialect = ENGINES[request.param]
    async with make(experts=TINY) as engine, LiftingTransport() as transport:
        engine.answer = lambda _: Reply(tokens=4, finish="stop")
        yield Scene(engine, dialect(), transport)


def rows(answer: Answer, layout: Any, held: int = 0) -> Any:
    """Read what came, as of the whole sequence."""
    completion = answer.completion
    assert answer.raw is not None
    stopped = completion.engine_finish_reason == "stop"
    return decode(answer.raw, layout, tokens=len(PROMPT) + len(completion.ids), held=held, stopped=stopped).tolist()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("start", [0, 2, 4])
async def test_the_same_rows_of_every_engine(scene: Scene, start: int, stream: bool) -> None:
    """From the token on that was asked for up to the last but one, the stop token's ids and rows aligned."""
    answer = await scene.call(start, stream=stream)
    assert answer.completion.finish_reason == "stop"
    expected = TINY.rows([*PROMPT, *answer.completion.ids])
    layout = filled((await scene.profile()).experts, TINY.layout)
    assert rows(answer, layout, held=start) == expected[start:].tolist()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_abort_has_the_rows_of_what_it_has(scene: Scene, stream: bool) -> None:
    """A request that is cut while it runs brings the routing of its tokens, and goes on from there."""
    scene.engine.answer = lambda _: Reply(tokens=2, finish="abort")
    answer = await scene.call(0, stream=stream)
    assert answer.completion.finish_reason == "abort"
    assert rows(answer, TINY.layout) == TINY.rows([*PROMPT, *answer.completion.ids]).tolist()


async def test_an_engine_that_loses_them(scene: Scene) -> None:
    """They were asked for, there are tokens, and nothing else: that is none, and no error of the parser."""
    scene.engine.lose_experts = True
    answer = await scene.call(0)
    assert answer.raw is None
    assert answer.completion.ids


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nobody_asks_who_did_not_mean_to(scene: Scene, stream: bool) -> None:
    """P28: whatever the prompt line or the sampling names, a request without routed experts asks for none."""
    await scene.profile()
    answer = await scene.call(None, stream=stream, extra=dict(RUDE), sampling=SamplingConfig(extra=RUDE))
    params = answer.sent.get("sampling_params", {})
    assert RUDE.keys().isdisjoint(answer.sent)
    assert RUDE.keys().isdisjoint(params)
    assert answer.raw is None
    assert len(answer.completion.ids) == 4


async def test_who_asks_is_not_talked_over(scene: Scene) -> None:
    """A prompt line cannot move the start of what is asked for."""
    answer = await scene.call(2, extra=dict(RUDE), sampling=SamplingConfig(extra=RUDE))
    assert rows(answer, TINY.layout, held=2) == TINY.rows([*PROMPT, *answer.completion.ids])[2:].tolist()


async def test_the_switch_is_seen(scene: Scene) -> None:
    """An engine says whether it was started to return them."""
    assert "experts" in (await scene.profile()).capabilities
    scene.engine.experts = None
    assert "experts" not in (await scene.profile()).capabilities
