"""How each engine is asked for routed experts, and what of an answer is taken for them."""

from typing import Any

import numpy as np
import orjson
import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Dialect, GenerateRequest, Lift, LMDeployDialect, Reply, SGLangDialect, VLLMDialect
from rollout_svc.engines.params import EXPERT_KEYS
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.errors import SampleFailure
from rollout_svc.tensors.experts import RawExperts

DIALECTS = (SGLangDialect, VLLMDialect, LMDeployDialect)
KEY = "00ffffffffffffffffffffffffffffffffffffff0100000001e1f505"


def asked(start: int | None = 3, **rest: Any) -> GenerateRequest:
    """A request."""
    return GenerateRequest("0" * 32, [1, 2, 3, 4], 8, SamplingConfig(), experts_from=start, **rest)


def experts_keys(dialect: Dialect, request: GenerateRequest) -> dict[str, Any]:
    """Whatever a body says of routed experts."""
    body = orjson.loads(dialect.generate(request).body or b"")
    told = {**body, **body.get("sampling_params", {})}
    return {key: value for key, value in told.items() if "experts" in key}


def test_each_is_asked_in_its_own_words() -> None:
    """SGLang takes a start, vLLM nothing but one, LMDeploy none."""
    asking = {"return_routed_experts": True, "routed_experts_start_len": 3}
    assert experts_keys(SGLangDialect(), asked()) == asking
    assert experts_keys(VLLMDialect(), asked()) == {"routed_experts_prompt_start": 3}
    assert experts_keys(LMDeployDialect(), asked()) == {"return_routed_experts": True}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_asked_for_is_lifted(dialect: Any, stream: bool) -> None:
    """As bytes or as numbers, up to the size that the request allows."""
    encoding: Any = "numbers" if dialect is LMDeployDialect else "base64"
    lift = dialect().generate(asked(experts_max_bytes=123), stream=stream).lift
    assert lift == Lift("routed_experts", encoding, 123)
    assert dialect().generate(asked(None), stream=stream).lift is None


def test_what_vllm_sends_unasked_is_kept_off_the_loop() -> None:
    """Its switch is for all requests: an evaluation's answer is as heavy, and nothing is made of it."""
    dialect = VLLMDialect()
    dialect.parse_probe(probed(model_config={"enable_return_routed_experts": True}))
    assert dialect.generate(asked(None)).lift == Lift("routed_experts", "base64", 2**30)
    assert dialect.experts_of(b"12", asked(None)) is None
    dialect.parse_probe(probed())
    assert dialect.generate(asked(None)).lift is None


def probed(**config: Any) -> list[Reply]:
    """What a vLLM answers to its probe."""
    bodies: list[Any] = [
        {"version": "0.32.0"},
        {"data": [{"id": "m", "parent": None}]},
        {},
        {"weight_version": "0"},
        {"paths": {}},
        {},
        {"vllm_config": config},
    ]
    return [Reply(200, orjson.dumps(body)) for body in bodies]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_users_keys_ask_for_nothing(dialect: Any) -> None:
    """P28: what is passed on to an engine is passed on without them, and stays as it is."""
    rude: dict[str, Any] = {**dict.fromkeys(EXPERT_KEYS, 1), "kept": 1}
    request = asked(None, extra=rude)
    request.sampling = SamplingConfig(extra=rude)
    made = dialect()
    assert experts_keys(made, request) == {}
    assert b'"kept":1' in (made.generate(request).body or b"")
    assert rude.keys() >= EXPERT_KEYS


def test_what_was_lifted_is_named() -> None:
    """Its form is its dialect's; LMDeploy sends all rows, whatever was asked for."""
    assert SGLangDialect().experts_of(b"12", asked()) == RawExperts("int32", b"12", 3)
    assert VLLMDialect().experts_of(memoryview(b"12"), asked()) == RawExperts("npy", memoryview(b"12"), 3)
    array = np.zeros((3, 2, 1), dtype=np.uint16)
    assert LMDeployDialect().experts_of(array, asked()) == RawExperts("array", array, 0)
    assert LMDeployDialect().experts_of(KEY, asked()) == RawExperts("key", KEY, 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_lifted_is_none(dialect: Any) -> None:
    """Who asked has to say whether that is a failure."""
    assert dialect().experts_of(None, asked()) is None


@pytest.mark.parametrize(
    ("dialect", "lifted"),
    [
        (SGLangDialect, "text"),
        (SGLangDialect, np.zeros(3)),
        (VLLMDialect, KEY),
        (LMDeployDialect, b"12"),
        (LMDeployDialect, "gASVKAAAAAAAAACMA3JheQ=="),  # how a pickle begins
        (LMDeployDialect, ""),
    ],
)
def test_what_no_engine_of_the_kind_sends_is_refused(dialect: Any, lifted: Any) -> None:
    """P34: a failure of the sample; a pickle is never read, and never asked Ray for."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        dialect().experts_of(lifted, asked())


def test_a_router_would_drop_the_question() -> None:
    """So it is not put."""
    with pytest.raises(SampleFailure, match=r"dropped_by_router.*routed experts: the router drops"):
        RoutedSGLang().generate(asked())
    assert RoutedSGLang().generate(asked(None)).lift is None
