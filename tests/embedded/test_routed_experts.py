"""Routed experts over HTTP: who gets them, in which shape, and that they replay what the engine has computed."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import torch

from rollout_svc.embedded.job import Job
from rollout_svc.embedded.model import load_weights, save_weights
from rollout_svc.embedded.routing import DENSE
from rollout_svc.embedded.run import _prepare
from rollout_svc.embedded.sampling import Sampling
from rollout_svc.tensors.experts import Layout, RawExperts, decode
from tests.embedded.helpers import CONFIG, MOE_CONFIG, moe_model, plain_logprobs, served

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from rollout_svc.embedded.model import TinyTransformer
    from tests.embedded.helpers import Served

LAYOUT = Layout(num_experts=8, top_k=2, layers=3, moe_layers=(1, 2))
PROMPT = list(range(65, 97))


def serving(**kwargs: Any) -> AbstractAsyncContextManager[Served]:
    """A served mixture of experts."""
    settings: dict[str, Any] = {"is_open": True, "config": MOE_CONFIG, "tells_experts": True}
    return served(**settings | kwargs)


def asked(prompt: list[int] = PROMPT, *, start: int | None = None, limit: int = 16, **keys: Any) -> dict[str, Any]:
    """A request for tokens, log-probabilities and routed experts."""
    sampling = {"max_new_tokens": limit, "sampling_seed": 0, "ignore_eos": True}
    wanted = {"return_logprob": True, "return_routed_experts": True}
    return {"rid": "r", "input_ids": prompt, "sampling_params": sampling, "routed_experts_start_len": start} | (
        wanted | keys
    )


def rows_of(answer: dict[str, Any], prompt: list[int], start: int = 0) -> torch.Tensor:
    """int64[tokens - 1 - start, moe_layers, top_k] of an answer, read as the service reads it."""
    raw = RawExperts("int32", base64.b64decode(answer["meta_info"]["routed_experts"]), start)
    tokens = len(prompt) + len(answer["output_ids"])
    return torch.from_numpy(decode(raw, LAYOUT, tokens=tokens, held=start)).long()


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """The log-probabilities of an answer."""
    return [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


def replayed(model: TinyTransformer, prompt: list[int], ids: list[int], rows: torch.Tensor) -> list[float]:
    """Log-probabilities of an output by a plain forward pass along given rows."""
    return plain_logprobs(model, Job("replay", prompt, Sampling(), len(ids), ids=ids), rows)


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Two files of weights, sure enough of themselves."""
    paths = [tmp_path / f"{seed}.safetensors" for seed in (1, 2)]
    for seed, path in enumerate(paths, start=1):
        save_weights(moe_model(seed), path)
    return paths


def model_of(path: Path) -> TinyTransformer:
    """The model of a file of weights."""
    model = moe_model()
    load_weights(model, path)
    return model


async def load(engine: Served, path: Path, version: int) -> None:
    """Have an engine take a file of weights."""
    status, body = await engine.call(
        "/update_weights_from_disk", {"model_path": str(path), "weight_version": str(version)}
    )
    assert (status, body["success"]) == (200, True)


@pytest.mark.parametrize("start", [None, 0, 5, len(PROMPT)])
async def test_an_answer_holds_raw_int32_of_all_hidden_layers_from_the_start(start: int | None) -> None:
    """(tokens - 1 - start, layers, top_k), experts where there are some, and in a dense layer what is none."""
    async with serving() as engine:
        status, answer = await engine.call("/generate", asked(start=start))
        assert status == 200
        raw = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype="<i4").reshape(-1, 3, 2)
        assert len(raw) == len(PROMPT) + 16 - 1 - (start or 0)
        assert (raw[:, 0] == DENSE).all()
        assert ((raw[:, 1:] >= 0) & (raw[:, 1:] < 8)).all()
        whole = rows_of((await engine.call("/generate", asked()))[1], PROMPT)
        assert torch.equal(rows_of(answer, PROMPT, start or 0), whole[start or 0 :])


async def test_a_sample_continued_over_an_update_replays_span_by_span(weights: list[Path]) -> None:
    """The old span under the old weights and rows, the new one under the new, its rows from those held on.

    The prefix of the continuation went through experts of the new weights' own choice, which nobody trains on.
    """
    async with serving(is_open=False) as engine:
        await load(engine, weights[0], 1)
        cut = asyncio.create_task(engine.call("/generate", asked(limit=40)), name="cut")
        await engine.queued(1)
        await engine.step(9)
        await engine.call("/abort_request", {"abort_all": True})
        first = (await cut)[1]
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        old = first["output_ids"]
        assert len(old) == 10
        engine.scheduler.open()
        await load(engine, weights[1], 2)
        prefix = PROMPT + old
        held = rows_of(first, PROMPT)
        second = (await engine.call("/generate", asked(prefix, start=len(held))))[1]
    new = rows_of(second, prefix, len(held))
    assert len(held) + len(new) == len(prefix) + 16 - 1
    assert logprobs_of(first) == pytest.approx(replayed(model_of(weights[0]), PROMPT, old, held), abs=1e-4)
    free = torch.cat([-torch.ones_like(held), new])
    again = replayed(model_of(weights[1]), prefix, second["output_ids"], free)
    assert logprobs_of(second) == pytest.approx(again, abs=1e-4)
    of_the_old = replayed(model_of(weights[0]), prefix, second["output_ids"], torch.cat([held, new]))
    assert logprobs_of(second) != pytest.approx(of_the_old, abs=1e-4)


async def test_only_the_last_chunk_of_a_stream_has_them() -> None:
    """The others would repeat most of it each time."""
    async with serving() as engine, engine.session.post("/generate", json=asked(stream=True)) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    chunks = [orjson.loads(line.removeprefix(b"data: ")) for line in lines]
    assert all("routed_experts" not in chunk["meta_info"] for chunk in chunks[:-1])
    assert len(rows_of(chunks[-1], PROMPT)) == len(PROMPT) + 15


async def test_what_never_ran_has_none() -> None:
    """Aborted in the queue: no token, no row, no error."""
    async with serving(is_open=False, max_running=1) as engine:
        first = engine.generate("first", limit=40)
        await engine.queued(1)
        await engine.step()
        second = asyncio.create_task(engine.call("/generate", asked()), name="second")
        await engine.queued(2)
        await engine.call("/abort_request", {"abort_all": True})
        answer = (await second)[1]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == []
        assert "routed_experts" not in answer["meta_info"]
        await first


@pytest.mark.parametrize("config", [CONFIG, MOE_CONFIG])
async def test_an_engine_that_does_not_tell_says_so_and_answers_without(config: Any) -> None:
    """Asking is no error: the field is missing, as it is from an engine without the flag."""
    async with serving(config=config, tells_experts=False) as engine:
        assert (await engine.call("/server_info", method="GET"))[1]["enable_return_routed_experts"] is False
        status, answer = await engine.call("/generate", asked())
        assert status == 200
        assert "routed_experts" not in answer["meta_info"]


async def test_who_does_not_ask_gets_none() -> None:
    """Whatever the engine could tell."""
    async with serving() as engine:
        answer = (await engine.call("/generate", asked(return_routed_experts=False)))[1]
        assert "routed_experts" not in answer["meta_info"]


@pytest.mark.parametrize("start", [-1, len(PROMPT) + 1, 1.5, True, "0"])
async def test_a_start_that_is_not_within_the_prompt_is_refused(start: Any) -> None:
    """400, the key named."""
    async with serving() as engine:
        status, answer = await engine.call("/generate", asked(start=start))
        assert status == 400
        assert "routed_experts_start_len" in str(answer)


async def test_the_engine_describes_its_experts() -> None:
    """What a reader of raw int32 has to know, and whether it is told at all."""
    async with serving() as engine:
        info = (await engine.call("/server_info", method="GET"))[1]
    told = {key: info[key] for key in ("enable_return_routed_experts", "num_experts", "top_k", "layers", "moe_layers")}
    assert told == {
        "enable_return_routed_experts": True,
        "num_experts": 8,
        "top_k": 2,
        "layers": 3,
        "moe_layers": [1, 2],
    }


@pytest.mark.parametrize(
    ("model", "flag", "tells"), [("tiny-moe", True, True), ("tiny-moe", False, False), ("tiny", True, False)]
)
async def test_a_model_with_experts_tells_them_unless_it_is_not_to(model: str, *, flag: bool, tells: bool) -> None:
    """The flag is on by itself, and means nothing for a model without experts."""
    server = _prepare(model, 0, None, (None, None), 8, None, None, tells_experts=flag)()
    assert server._identity.tells_experts is tells
