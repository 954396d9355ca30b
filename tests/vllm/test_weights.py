"""New weights in a real vLLM, proved by its tokens: two models differ from their first tokens on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.workers.worker import WorkerState
from tests.support.stage import Stage
from tests.vllm.models import TOLERANCE, Oracle
from tests.vllm.server import Server
from tests.vllm.site import answers, met_half_done, prompt_ids, spans, vllm_stage

LENGTH = 48
TRIED_S = 10.0
"""How long an engine is watched that must not come back, in seconds."""
LONG = 1200
"""Tokens of an answer that takes seconds."""
CACHED = [(7 * n + 3) % 500 for n in range(300)]
"""A prompt of two whole blocks of the engine's prefix cache, and some."""


def disk(oracle: Oracle, model: str) -> dict[str, Any]:
    """Where a model's weights are."""
    return {"kind": "disk", "path": str(oracle.path(model))}


async def one(made: Stage, number: int, step: int = 0) -> dict[str, Any]:
    """Push a prompt and take its answer."""
    await made.push(1, number)
    [sample] = await answers(made, 1, step)
    return sample


@pytest.mark.smoke
async def test_weights_from_disk_change_what_is_said(engine: Server, oracle: Oracle) -> None:
    """After a disk update the tokens are those of the new model, and say so; back again, those of the old."""  # P7 P24
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        before = await one(made, 0)
        assert oracle.is_greedy("a", prompt_ids(0), before["response_ids"])
        for version, model in ((1, "b"), (2, "a")):
            done = await made.service.update_weights(version, disk(oracle, model), pause={})
            assert done["workers"]["w0"] == {"ok": True, "version": version}
            after = await one(made, version, version)
            assert oracle.is_greedy(model, prompt_ids(version), after["response_ids"])
            assert spans(after) == [(version, 0, LENGTH)]
    assert (await asyncio.to_thread(engine.call, "GET", "/weight_info"))[1] == {"weight_version": "2"}


async def test_no_prefix_of_the_old_weights_is_read_under_the_new(engine: Server, oracle: Oracle) -> None:
    """A reload leaves vLLM's prefix cache as it was: the service drops it, as the logprobs show."""  # P25
    prompt = {"input_ids": CACHED, "ground_truth": 0}
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.push([prompt | {"id": "p0"}])
        await answers(made)
        await made.service.update_weights(1, disk(oracle, "b"), pause={})
        await made.push([prompt | {"id": "p1"}])
        [sample] = await answers(made, 1, 1)
    wanted = oracle.logprobs("b", CACHED, sample["response_ids"])
    assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.smoke
@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_an_answer_frozen_over_a_swap_has_two_versions(engine: Server, oracle: Oracle, kv: str) -> None:
    """Frozen mid-flight it goes on under the new weights, and says where; without its cache, from a fresh one."""  # P7
    async with vllm_stage(engine, max_tokens=LONG) as made:
        held = made.worker().calls
        number, _ = await met_half_done(made, engine, 100, lambda: bool(held), mode="keep", kv=kv)
        await made.service.update_weights(1, disk(oracle, "b"))
        await made.resume(weight_version=1)
        [sample] = await answers(made, 1, 1)
    [(_, start, swap), (_, _, end)] = found = spans(sample)
    assert found == [(0, 0, swap), (1, swap, LONG)]
    assert (start, end) == (0, LONG)
    assert 100 <= swap < LONG
    prompt, ids = prompt_ids(number), sample["response_ids"]
    assert oracle.is_greedy("a", prompt, ids[:swap])
    assert not oracle.is_greedy("a", prompt + ids[:swap], ids[swap:])
    # With its old cache the new weights read what the old ones wrote: no plain forward says what comes then.
    assert oracle.is_greedy("b", prompt + ids[:swap], ids[swap:]) == (kv == "drop")


async def test_weights_a_trainer_moved_itself_are_adopted(engine: Server, oracle: Oracle) -> None:
    """`external`: the trainer loads them behind a pause, without label or flush; we see to both."""  # P24 P25
    prompt = {"input_ids": CACHED, "ground_truth": 0}
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(oracle.path("b"))}}
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.push([prompt | {"id": "p0"}])
        await answers(made)
        await made.pause()
        await asyncio.to_thread(engine.do, "/collective_rpc", load)
        done = await made.service.update_weights(1, {"kind": "external"})
        assert done["workers"]["w0"] == {"ok": True, "version": 1}
        await made.resume(weight_version=1)
        await made.push([prompt | {"id": "p1"}])
        [sample] = await answers(made, 1, 1)
    assert spans(sample) == [(1, 0, LENGTH)]
    wanted = oracle.logprobs("b", CACHED, sample["response_ids"])
    assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


async def test_a_load_that_failed_keeps_the_engine_from_traffic(engine: Server, tmp_path: Path) -> None:
    """After a failed load the engine has no weights, and dies of the next request: not one may go there."""  # P24
    missing = {"kind": "disk", "path": str(tmp_path / "none")}
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await one(made, 0)
        with pytest.raises(NotNow, match="did not reach w0"):
            await made.service.update_weights(1, missing, pause={})
        await made.resume()
        await made.push(1, 1)
        tried = asyncio.create_task(made.take(1, 1, TRIED_S), name="take")  # long enough for it to be tried again
        with pytest.raises(NotNow):
            await tried
        assert made.worker().state is not WorkerState.ACTIVE
        assert await asyncio.to_thread(engine.is_up)


async def test_a_load_that_failed_is_undone_by_the_last_that_did_not(
    engine: Server, oracle: Oracle, tmp_path: Path
) -> None:
    """Where there are weights to go back to they are loaded again, and the engine has traffic again."""  # P19 P24
    missing = {"kind": "disk", "path": str(tmp_path / "none")}
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.service.update_weights(1, disk(oracle, "b"), pause={})
        with pytest.raises(NotNow, match="did not reach w0"):
            await made.service.update_weights(2, missing, pause={})
        await made.resume()
        sample = await one(made, 0, 1)
    assert spans(sample) == [(1, 0, LENGTH)]
    assert oracle.is_greedy("b", prompt_ids(0), sample["response_ids"])
