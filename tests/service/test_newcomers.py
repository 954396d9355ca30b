"""Engines that are added later, or come back: they get traffic where the start would have let them in."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import ConfigError
from rollout_svc.events import SampleFailed
from rollout_svc.workers.worker import WorkerState
from tests.support.answers import two_tokens as answered
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import Stage, stage


async def until_refused(made: Stage, index: int, words: str) -> None:
    """Wait until a worker is out, and status says why in one line."""
    await made.until(lambda: words in made.worker(index).reason, words)
    assert made.worker(index).state in (WorkerState.RECOVERING, WorkerState.DEAD)
    record = made.service.status()["workers"][index]
    assert (record["reason"].startswith("unfit: "), "\n" in record["reason"]) == (True, False)


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("tokenizer_path", "/other", "has tokenizer '/other', w0 has '/models/tiny'"),
        ("vocab_size", 300, "has vocabulary 300, w0 has 512"),
        ("model_path", "/models/huge", "has model '/models/huge', w0 has '/models/tiny'"),
    ],
)
async def test_one_that_differs_from_the_fleet_gets_no_traffic(what: str, value: object, words: str) -> None:
    """Its answers would be trained on as if they were the others'; it says in what it differs, and from whom."""
    same = {"model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "vocab_size": 512}
    async with (
        FakeSGLang(weight_version="0", **same) as first,  # type: ignore[arg-type]
        FakeSGLang(weight_version="0", **{**same, what: value}) as other,  # type: ignore[arg-type]
        stage(first) as made,
    ):
        await made.service.add_worker(WorkerConfig(url=other.url))
        await until_refused(made, 1, f"w1 at {other.url} {words}")
        first.answer = other.answer = answered
        await made.push(3)
        await made.take(groups=3)
        assert (len(first.requests), len(other.requests)) == (3, 0)


async def test_one_that_cannot_do_what_is_configured_gets_no_traffic() -> None:
    """A setting that an engine lacks is refused by name, later as at the start."""
    sampling = {"max_tokens": 16, "seed": 3}
    async with (
        FakeSGLang(weight_version="0") as first,
        FakeLMDeploy() as other,
        stage(first, sampling=sampling) as made,
    ):
        await made.service.add_worker(WorkerConfig(url=other.url))
        await until_refused(made, 1, f"w1 at {other.url} (lmdeploy) cannot do seed: LMDeploy takes none")


async def test_one_that_takes_no_aborts_from_us_gets_no_traffic() -> None:
    """Its data key is good and its control key is not: nothing that runs there could be stopped."""  # P9 P35
    keys = {"api_key": "data", "admin_key": "control"}
    async with FakeSGLang(weight_version="0", **keys) as engine:  # type: ignore[arg-type]
        worker = {"url": engine.url, "api_key": "data", "admin_key": "another"}
        async with stage(worker, ready=False) as made:
            with pytest.raises(ConfigError, match=r"workers.0.admin_key: w0 at .*: POST /abort_request: HTTP 401"):
                await made.service.ready()
        async with FakeSGLang(weight_version="0") as first, stage(first) as made:
            await made.service.add_worker(WorkerConfig.model_validate(worker))
            await made.until(lambda: made.worker(1).state is WorkerState.RECOVERING)
            assert made.worker(1).reason == "admin_key_refused: POST /abort_request: HTTP 401"
            assert not engine.requests


async def test_one_that_comes_back_as_something_else_waits_until_it_is_what_it_was() -> None:
    """Restarted with another tokenizer it is asked again and again, and gets nothing; no request is lost."""  # P19
    async with FakeSGLang(weight_version="0", tokenizer_path="a") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await engine.kill()
        await made.until(lambda: made.worker().state is not WorkerState.ACTIVE)
        engine.tokenizer_path = "b"
        engine.answer = answered
        await engine.restart()
        await until_refused(made, 0, f"w0 at {engine.url} has tokenizer 'b', it had 'a'")
        assert len(engine.requests) == 1
        engine.tokenizer_path = "a"
        assert len((await made.take())["groups"]) == 1
        assert not made.of(SampleFailed)


async def test_models_are_compared_until_weights_are_moved(tmp_path: Path) -> None:
    """Afterwards engines name what they loaded: one that still has its first weights is brought to the others'."""
    async with (
        FakeSGLang(model_path="step-0") as first,
        FakeSGLang(model_path="step-9", tokenizer_path="step-0") as later,
        stage(first) as made,
    ):
        await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)}, pause={})
        await made.service.add_worker(WorkerConfig(url=later.url))
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert later.weight_version == "1"


async def test_a_fleet_may_be_replaced_as_a_whole() -> None:
    """Whoever was removed is forgotten: the first of the new ones says what the others have to be."""
    async with (
        FakeSGLang(weight_version="0", tokenizer_path="a") as old,
        FakeSGLang(weight_version="0", tokenizer_path="b") as new,
        FakeSGLang(weight_version="0", tokenizer_path="a") as late,
        stage(old) as made,
    ):
        await made.service.remove_worker("w0")
        await made.until(lambda: not made.parts.pool.workers)
        await made.service.add_worker(WorkerConfig(url=new.url))
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        await made.service.add_worker(WorkerConfig(url=late.url))
        await made.until(lambda: "has tokenizer 'a', w1 has 'b'" in made.worker(2).reason)


async def test_one_that_was_added_during_the_start_is_looked_at_when_it_ends() -> None:
    """The configured ones say what the fleet is, also where another was quicker."""
    async with (
        FakeSGLang(weight_version="0", tokenizer_path="a") as slow,
        FakeSGLang(weight_version="0", tokenizer_path="b") as quick,
    ):
        await slow.refuse()
        async with stage(slow, ready=False) as made:
            await made.service.add_worker(WorkerConfig(url=quick.url))
            await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
            await slow.listen()
            await made.service.ready()
            await until_refused(made, 1, "has tokenizer 'b', w0 has 'a'")


async def test_an_update_passes_over_one_that_is_no_kin(tmp_path: Path) -> None:
    """Weights are not loaded into another engine, whatever it says of its version."""  # P24
    async with (
        FakeSGLang(weight_version="0", tokenizer_path="a") as first,
        FakeSGLang(weight_version="0", tokenizer_path="a") as second,
        stage(first, second) as made,
    ):
        await made.push(2)
        await second.wait_running(1)
        await second.kill()
        await made.until(lambda: made.worker(1).state is not WorkerState.ACTIVE)
        second.tokenizer_path = "b"
        await second.restart()
        await until_refused(made, 1, "has tokenizer 'b', w0 has 'a'")
        done = await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)}, pause={})
        assert (done["workers"]["w0"]["ok"], "unfit" in done["workers"]["w1"]["skipped"]) == (True, True)
        assert second.weight_version == "default"
