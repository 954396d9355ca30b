"""Engines for those who want routed experts: refused by name where they have none, and believed until they lie."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import ConfigError
from rollout_svc.events import CapabilityWithdrawn
from rollout_svc.workers.withdrawal import withdraw
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM
from tests.support.routing import TINY
from tests.support.stage import Stage, stage

WANTED = {"enabled": True, "layers": TINY.layers, "top_k": TINY.top_k}
NONE_CAME = "returned no routed experts although they were asked for"


async def start_refused(engine: Any, experts: dict[str, Any]) -> str:
    """Start a service; returns what it says instead."""
    async with stage(engine, ready=False, experts=experts) as made:
        with pytest.raises(ConfigError) as refused:
            await made.service.ready()
    return str(refused.value)


@pytest.mark.parametrize("make", [FakeSGLang, FakeVLLM, FakeLMDeploy])
async def test_an_engine_without_the_switch_stops_the_start(make: Any) -> None:
    """Before anything is generated, at the setting, with the switch."""  # P35
    async with make() as engine:
        said = await start_refused(engine, WANTED)
        assert said.startswith("experts.enabled: w0 at ")
        assert "--enable-return-routed-experts" in said
        assert not engine.requests


@pytest.mark.parametrize("make", [FakeSGLang, FakeVLLM, FakeLMDeploy])
async def test_one_with_it_is_let_in(make: Any) -> None:
    """It shows in its record."""
    async with make(experts=TINY) as engine, stage(engine, experts=WANTED) as made:
        assert "experts" in made.service.status()["workers"][0]["capabilities"]


async def test_what_nobody_says_of_the_model_stops_the_start() -> None:
    """SGLang sends no shape: the two numbers it takes are asked for."""
    async with FakeSGLang(experts=TINY) as engine:
        said = await start_refused(engine, {"enabled": True})
        assert "experts.layers: w0 at " in said
        assert "experts.top_k: w0 at " in said


async def test_the_config_of_a_model_beside_us_is_read(tmp_path: Path) -> None:
    """Where the model lies on this machine nothing has to be set, and what is set has to be right."""
    config = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with FakeSGLang(experts=TINY, model_path=str(tmp_path)) as engine:
        async with stage(engine, experts={"enabled": True}) as made:
            profile = made.worker().profile
            assert profile is not None
            assert profile.experts == TINY.layout
        assert "experts.layers: " in await start_refused(engine, {"enabled": True, "layers": 5})


async def test_an_engine_that_says_it_itself_is_believed() -> None:
    """The built-in engine tells its routing with the rest."""
    async with FakeSGLang(experts=TINY) as engine:
        engine.told = {"num_experts": 8, "top_k": 2, "layers": 4}
        async with stage(engine, experts={"enabled": True}):
            pass
        assert "experts.num_experts: w0 at " in await start_refused(engine, {"enabled": True, "num_experts": 9})


async def until_out(made: Stage, index: int, words: str) -> None:
    """Wait until a worker is out, and says why."""
    await made.until(lambda: words in made.worker(index).reason, words)
    assert made.worker(index).state is WorkerState.RECOVERING
    assert "experts" not in made.service.status()["workers"][index]["capabilities"]


async def test_one_that_comes_later_without_the_switch_gets_no_traffic() -> None:
    """Later as at the start."""
    async with (
        FakeSGLang(weight_version="0", experts=TINY) as first,
        FakeSGLang(weight_version="0") as other,
        stage(first, experts=WANTED) as made,
    ):
        await made.service.add_worker(WorkerConfig(url=other.url))
        await until_out(made, 1, "(sglang) returns no routed experts: it does not say that it was started with")


async def test_one_of_another_model_gets_no_traffic() -> None:
    """Its routing has another shape than the others'."""
    async with (
        FakeSGLang(weight_version="0", experts=TINY) as first,
        FakeSGLang(weight_version="0", experts=TINY) as other,
    ):
        first.told, other.told = {"num_experts": 8}, {"num_experts": 16}
        async with stage(first, experts=WANTED) as made:
            await made.service.add_worker(WorkerConfig(url=other.url))
            await made.until(lambda: "has experts a layer 16, w0 has 8" in made.worker(1).reason)


@pytest.mark.parametrize(("make", "look"), [(FakeSGLang, "/model_info"), (FakeLMDeploy, "/v1/models")])
async def test_one_that_returned_none_gets_no_more_until_it_is_restarted(make: Any, look: str) -> None:
    """Said once, however many answers show it; that it still claims it can brings nothing back."""
    async with make(experts=TINY) as engine, stage(engine, pushed=1, experts=WANTED) as made:
        await engine.wait_running(1)
        for _ in range(2):
            withdraw(made.worker(), "experts", NONE_CAME, made.service.bus)
        await until_out(made, 0, f"unfit: w0 at {engine.url} {NONE_CAME}")
        [event] = made.of(CapabilityWithdrawn)
        assert (event.worker, event.capability, event.reason) == ("w0", "experts", NONE_CAME)
        assert len(made.worker().calls) == 1  # what it runs goes on
        probes = engine.hits.count(("GET", look))
        await made.until(lambda: engine.hits.count(("GET", look)) > probes + 1, timeout_s=10)
        await until_out(made, 0, f"returns no routed experts: {NONE_CAME}")
        await engine.kill()
        async with asyncio.timeout(10):
            while "connection" not in made.worker().reason:  # noqa: ASYNC110 - what changes a reason rings no bell
                await asyncio.sleep(0.01)
        await engine.restart()
        await made.until(lambda: "experts" in made.worker().capabilities, timeout_s=10)
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE, timeout_s=10)
