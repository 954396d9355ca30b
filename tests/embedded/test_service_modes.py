"""The service and the built-in engine together: freezes, and weights that change under frozen requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.embedded.model import save_weights
from tests.embedded.helpers import PATIENCE_S, Served, served, small_model
from tests.support.stage import Stage, stage

LIMIT = 16
FROZEN_AFTER = 6
"""Tokens that are made before the freeze."""


def settings() -> dict[str, Any]:
    """Greedy answers of `LIMIT` tokens."""
    return {"sampling": {"max_tokens": LIMIT, "temperature": 0.0, "extra": {"ignore_eos": True}}}


async def interrupted(engine: Served, made: Stage, **pause: Any) -> None:
    """Push one prompt, let it make some tokens, and pause as told."""
    await made.push(1)
    await engine.queued(1)
    await engine.step(FROZEN_AFTER - 1)  # the first makes two
    report = await made.pause(5.0, **pause)
    assert report.clean


async def answer(engine: Served, made: Stage, step: int = 0) -> dict[str, Any]:
    """Let everything run and take the one sample."""
    engine.scheduler.open()
    sample: dict[str, Any] = (await made.take(step))["groups"][0]["samples"][0]
    return sample


async def uninterrupted() -> list[int]:
    """The answer nobody interrupted."""
    async with served(is_open=True) as engine, stage(str(engine.session._base_url), pushed=1, **settings()) as made:
        ids: list[int] = (await answer(engine, made))["response_ids"]
        return ids


@pytest.mark.parametrize("pause", [{"mode": "keep"}, {"mode": "keep", "kv": "drop"}, {"mode": "abort"}])
async def test_an_interrupted_answer_is_the_uninterrupted_one(pause: dict[str, Any]) -> None:
    """Frozen in place, retracted, or aborted and continued: greedy tokens are the same, and none is lost."""  # P6 P10
    wanted = await uninterrupted()
    async with served() as engine, stage(str(engine.session._base_url), **settings()) as made:
        await interrupted(engine, made, **pause)
        steps = engine.scheduler.steps
        engine.scheduler.open()
        await engine.until(lambda: not engine.scheduler.busy or engine.scheduler.steps > steps)
        await made.resume()
        record = await answer(engine, made)
        assert record["response_ids"] == wanted
        assert len(record["logprobs"]) == LIMIT


@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_weights_change_under_a_frozen_answer(tmp_path: Path, kv: str) -> None:
    """The engine loads a file while it is frozen; the answer goes on under it and says where it changed."""  # P7 P24
    save_weights(small_model(seed=1), tmp_path / "model.safetensors")
    async with served() as engine, stage(str(engine.session._base_url), **settings()) as made:
        await interrupted(engine, made, mode="keep", kv=kv)
        updated = await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)})
        assert updated["workers"]["w0"] == {"ok": True, "version": 1}
        await made.resume(weight_version=1)
        record = await answer(engine, made, step=1)
        spans = [(span["version"], span["start"], span["end"]) for span in record["weight_versions"]]
        assert spans == [(0, 0, FROZEN_AFTER), (1, FROZEN_AFTER, LIMIT)]


async def test_a_freeze_follows_a_thaw_that_is_under_way() -> None:
    """Paused again before the engine has said that it goes on: frozen again with its cache; no abort."""  # P6
    async with served() as engine, stage(str(engine.session._base_url), **settings()) as made:
        await interrupted(engine, made, mode="keep")
        held = threading.Event()
        engine.engine.thread.post(lambda: held.wait(PATIENCE_S))  # no command to go on is answered before
        await made.resume()
        await made.until(lambda: made.worker().thaw_until > 0, "the engine is told to go on")
        pausing = made.start(made.pause(5.0, mode="keep"))
        await made.until(lambda: made.service.state == "pausing")
        held.set()
        report = await pausing
        assert (report.clean, [rung.name for rung in report.rungs]) == (True, ["gate", "freeze", "report"])
        assert (engine.engine.running, made.worker().frozen) == (1, True)
        await made.resume()
        assert (await answer(engine, made))["response_ids"] == await uninterrupted()


async def test_an_abort_over_a_freeze_takes_effect() -> None:
    """Frozen in place an abort needs a step: the service lets the engine go on, and gets the tokens."""  # P9 P10
    async with served() as engine, stage(str(engine.session._base_url), **settings()) as made:
        await interrupted(engine, made, mode="keep")
        engine.scheduler.permit(100)
        report = await made.pause(5.0, mode="abort")
        assert report.clean
        engine.assert_idle()
        [sample] = made.live_groups()[0].samples
        assert len(sample.response_ids) >= FROZEN_AFTER


async def test_an_answer_goes_on_after_its_engine_slept(tmp_path: Path) -> None:
    """Weights and cache are given up, new weights loaded, and the aborted answer is continued under them."""  # P7 P24
    save_weights(small_model(seed=1), tmp_path / "model.safetensors")
    async with served() as engine, stage(str(engine.session._base_url), **settings()) as made:
        await made.push(1)
        await engine.queued(1)
        await engine.step(FROZEN_AFTER - 1)
        report = await made.pause(5.0, offload=("weights", "kv_cache"))  # no step is allowed: it ends where it is
        engine.scheduler.permit(100)
        assert (report.clean, report.offloaded) == (True, {"w0": ["weights", "kv_cache"]})
        assert sum(parameter.nbytes for parameter in engine.scheduler.model.parameters()) == 0
        await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)})
        assert engine.engine.released == {"kv_cache"}
        await made.resume(weight_version=1)
        record = await answer(engine, made, step=1)
        assert [span["version"] for span in record["weight_versions"]] == [0, 1]
        assert len(record["response_ids"]) == LIMIT


async def test_an_engine_found_asleep_is_woken_with_its_weights() -> None:
    """The built-in engine says what it gave up, and that it kept it: it has traffic at once."""
    async with served(is_open=True) as engine:
        await engine.call("/release_memory_occupation", {"tags": ["weights"]})
        async with stage(str(engine.session._base_url), pushed=1, **settings()) as made:
            assert engine.engine.released == frozenset()
            assert len((await answer(engine, made))["response_ids"]) == LIMIT
