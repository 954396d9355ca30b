"""Updates of a real vLLM that fail part-way: until it has whole weights again, it makes no token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from rollout_svc.errors import BadRequest, NotNow
from rollout_svc.workers.worker import WorkerState
from tests.support.stage import Stage
from tests.vllm.checkpoints import BROKEN, broken
from tests.vllm.models import Oracle
from tests.vllm.server import Server
from tests.vllm.site import WAIT_S, answers, look, met_half_done, prompt_ids, sole, spans, vllm_stage

LENGTH: Final = 48
LONG: Final = 1900
"""Tokens of an answer that takes seconds."""
SEEN: Final = 20
"""Of them, when it is stopped, at the least."""


def disk(path: Path) -> dict[str, Any]:
    """Where weights are; their names are the engine's to judge: what it makes of others is asked here."""
    return {"kind": "disk", "path": str(path), "check_names": False}


async def label_of(engine: Server) -> str:
    """What the engine calls the weights it has."""
    said: str = (await asyncio.to_thread(engine.call, "GET", "/weight_info"))[1]["weight_version"]
    return said


async def assert_serves(made: Stage, oracle: Oracle, model: str, version: int, number: int) -> None:
    """It answers as the model does, and says which version that is."""
    await made.push(1, number)
    [sample] = await answers(made, 1, version)
    assert spans(sample) == [(version, 0, LENGTH)]
    assert oracle.is_greedy(model, prompt_ids(number), sample["response_ids"])


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_checkpoint_is_undone(engine: Server, oracle: Oracle, tmp_path: Path, how: str) -> None:
    """The fleet stays at the version it has; before the next token the engine has those weights again, whole."""  # P24
    bad = broken(oracle.path("a"), how, tmp_path)
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.service.update_weights(1, disk(oracle.path("b")), pause={})
        before = await asyncio.to_thread(engine.generated)
        with pytest.raises((NotNow, BadRequest)):
            await made.service.update_weights(2, disk(bad), pause={})
        assert made.service.status()["weight_version"] == 1
        if made.worker().state is not WorkerState.ACTIVE:
            assert await label_of(engine) == "loading 2"
        assert await asyncio.to_thread(engine.generated) == before
        if made.service.status()["state"] == "paused":
            await made.resume()
        await assert_serves(made, oracle, "b", 1, 0)
        await made.service.update_weights(2, disk(oracle.path("a")), pause={})
        await assert_serves(made, oracle, "a", 2, 1)


@pytest.mark.parametrize("how", ["wrong_shape", "torn_layer"])
async def test_the_next_good_checkpoint_mends_a_broken_one(
    engine: Server, oracle: Oracle, tmp_path: Path, how: str
) -> None:
    """Also where there is nothing to go back to, and the engine still has half a layer of the broken one."""  # P24
    bad = broken(oracle.path("b"), how, tmp_path)
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        with pytest.raises((NotNow, BadRequest)):
            await made.service.update_weights(1, disk(bad), pause={})
        before = await asyncio.to_thread(engine.generated)
        if made.service.status()["state"] == "paused":
            await made.resume()
        await made.service.update_weights(1, disk(oracle.path("b")), pause={})
        assert await asyncio.to_thread(engine.generated) == before
        await assert_serves(made, oracle, "b", 1, 0)


@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_what_is_frozen_in_half_loaded_weights_is_continued_under_whole_ones(
    engine: Server, oracle: Oracle, tmp_path: Path, kv: str
) -> None:
    """Let go as it is, it would kill the engine with its next token: it comes back with what it has."""  # P24 P6
    bad = broken(oracle.path("b"), "torn_layer", tmp_path)
    async with vllm_stage(engine, max_tokens=LONG) as made:
        held = made.worker().calls
        number, _ = await met_half_done(made, engine, SEEN, lambda: bool(held), mode="keep", kv=kv)
        with pytest.raises((NotNow, BadRequest)):
            await made.service.update_weights(1, disk(bad))
        await made.resume()
        await made.until(lambda: not made.worker().calls, "what it held is back", WAIT_S)
        kept = len(sole(made).response_ids)
        assert SEEN <= kept < LONG
        await made.service.update_weights(1, disk(oracle.path("b")), pause={})
        [sample] = await answers(made, 1, 1)
    assert spans(sample) == [(0, 0, kept), (1, kept, LONG)]
    prompt, ids = prompt_ids(number), sample["response_ids"]
    assert oracle.is_greedy("a", prompt, ids[:kept])
    assert oracle.is_greedy("b", prompt + ids[:kept], ids[kept:])


async def test_a_trainers_round_that_broke_off_is_mended_from_disk(engine: Server, oracle: Oracle) -> None:
    """`external`, half of it: labelled as loading it is not adopted, nor used, until there are whole weights."""  # P24
    bucket = {"path": str(oracle.path("b")), "part": 0, "parts": 3}
    missing = {"path": str(oracle.path("none"))}
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await assert_serves(made, oracle, "a", 0, 0)
        await made.pause()
        before = await asyncio.to_thread(engine.generated)
        await asyncio.to_thread(engine.do, "/update_weight_version", {"new_version": "loading 1"})
        await asyncio.to_thread(engine.do, "/start_weight_update")
        await asyncio.to_thread(engine.do, "/update_weights", {"update_info": bucket})
        status, said = await asyncio.to_thread(engine.call, "POST", "/update_weights", {"update_info": missing})
        assert status == 500, said
        with pytest.raises(NotNow, match="did not reach w0"):
            await made.service.update_weights(1, {"kind": "external"})
        await made.resume()
        await made.push(1, 1)
        await look(lambda: made.worker().refusals > 0, "it is looked at, and kept out")
        assert made.worker().state is not WorkerState.ACTIVE
        assert await label_of(engine) == "loading 1"
        assert await asyncio.to_thread(engine.generated) == before
        await made.service.update_weights(1, disk(oracle.path("b")), pause={})
        [sample] = await answers(made, 1, 1)
    assert spans(sample) == [(1, 0, LENGTH)]
    assert oracle.is_greedy("b", prompt_ids(1), sample["response_ids"])


async def test_an_engine_found_half_loaded_is_kept_out(engine: Server, oracle: Oracle) -> None:
    """A service that died in an update left it so: the next one gives it whole weights before any traffic."""  # P24
    await asyncio.to_thread(engine.do, "/update_weight_version", {"new_version": "loading 3"})
    await asyncio.to_thread(engine.do, "/start_weight_update")
    before = await asyncio.to_thread(engine.generated)
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.push(1, 0)
        await made.until(lambda: "restart it" in (made.worker().reason or ""), "it is kept out", WAIT_S)
        assert await asyncio.to_thread(engine.generated) == before
        await made.service.update_weights(4, disk(oracle.path("b")), pause={})
        [sample] = await answers(made, 1, 4)
    assert spans(sample) == [(4, 0, LENGTH)]
    assert oracle.is_greedy("b", prompt_ids(0), sample["response_ids"])
