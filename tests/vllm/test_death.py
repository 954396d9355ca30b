"""A real vLLM whose core is killed: its server ends by itself, is started again, and is taken back."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.workers.worker import WorkerState
from tests.vllm.models import Oracle
from tests.vllm.server import BOOT_S, SLOTS, Server
from tests.vllm.site import WAIT_S, generated, look, prompt_ids, spans, vllm_stage

LONG = 600
BACK_S = 60.0
"""From the engine's first healthy answer to the last group, in seconds: back-off, weights, and the answers."""


async def test_an_engine_core_that_was_killed_is_survived(engine: Server, oracle: Oracle) -> None:
    """Kill -9 mid-flight: nothing is lost, and the engine that returns gets the weights before any traffic."""  # P19
    async with vllm_stage(engine, max_tokens=LONG) as made:
        await made.service.update_weights(1, {"kind": "disk", "path": str(oracle.path("b"))}, pause={})
        async with generated(engine, 20 * SLOTS):
            await made.push(SLOTS)
        await asyncio.to_thread(engine.kill_core)
        await look(engine.is_gone, "the API server ends by itself")
        await made.until(lambda: made.worker().state is not WorkerState.ACTIVE, "it is out of traffic", WAIT_S)
        assert made.samples("failed") == 0
        await asyncio.to_thread(engine.stop)
        engine.launch()
        await look(engine.is_healthy, "it starts again", BOOT_S)
        samples = (await made.take(1, SLOTS, BACK_S))["groups"]
        assert made.samples("failed") == 0
    for group in samples:
        [sample] = group["samples"]
        number = int(group["prompt"]["id"][1:])
        assert spans(sample) == [(1, 0, LONG)]
        assert oracle.is_greedy("b", prompt_ids(number), sample["response_ids"])


async def test_an_engine_with_half_its_weights_is_mended_by_a_restart(engine: Server, oracle: Oracle) -> None:
    """An update broke off, with nothing to go back to: no token is made before it is another process."""  # P24
    bucket = {"path": str(oracle.path("b")), "part": 0, "parts": 3}
    async with vllm_stage(engine, max_tokens=LONG) as made:
        await made.pause()
        before = await asyncio.to_thread(engine.generated)
        await asyncio.to_thread(engine.do, "/update_weight_version", {"new_version": "loading 1"})
        await asyncio.to_thread(engine.do, "/start_weight_update")
        await asyncio.to_thread(engine.do, "/update_weights", {"update_info": bucket})
        with pytest.raises(NotNow, match="did not reach w0"):
            await made.service.update_weights(1, {"kind": "external"})
        await made.resume()
        await made.push(1)
        await look(lambda: "restart it" in made.worker().reason, "it is kept out")
        assert await asyncio.to_thread(engine.generated) == before
        await asyncio.to_thread(engine.stop)
        engine.launch()
        await look(engine.is_healthy, "it starts again", BOOT_S)
        [sample] = (await made.take(0, 1, BACK_S))["groups"][0]["samples"]
    assert spans(sample) == [(0, 0, LONG)]
    assert oracle.is_greedy("a", prompt_ids(0), sample["response_ids"])
