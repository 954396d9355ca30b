"""The service over vLLM: what its dialect makes of generating, stopping, weights, keys and death."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import SampleFailed
from rollout_svc.workers.worker import WorkerState
from tests.support.answers import two_tokens as answered
from tests.support.fake_vllm import Cut, FakeVLLM, Raw, Reset, Status
from tests.support.faults import Fault, Mangled
from tests.support.stage import PROMPT, Stage, stage
from tests.support.vllm_wire import CORE_DEAD, MANGLES

ABORT_ALL = "/abort_requests"
ABORT = "/inference/v1/abort_requests"
EXTERNAL = {"kind": "external"}
DISK = {"kind": "disk", "path": "/weights/1"}


@asynccontextmanager
async def over(*engines: FakeVLLM, worker: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Stage]:
    """Run a service over these; `worker`: further keys of each."""
    workers = [{"url": engine.url, "api_key": engine.api_key, **(worker or {})} for engine in engines]
    async with stage(*workers, **settings) as made:
        for engine in engines:
            engine.listeners.append(made.bell.ring)
        yield made


def spans(sample: dict[str, Any]) -> list[tuple[int | None, int, int]]:
    """Read the versions of a sample."""
    return [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]


# -- generating ----------------------------------------------------------------------------------------------


async def test_from_prompt_to_batch() -> None:
    """Found out by asking, labelled before traffic; ids, logprobs and versions are the engine's."""  # P7
    async with FakeVLLM(api_key="k1") as engine, over(engine, pushed=2, trainer={"prompt_repeat_k": 2}) as made:
        await engine.wait_running(4)
        engine.release(tokens=[7, 8], finish="length")
        batch = await made.take(groups=2)
        for group in batch["groups"]:
            for sample in group["samples"]:
                assert (sample["response_ids"], sample["logprobs"]) == ([7, 8], [-1.5, -1.5])
                assert (sample["finish_reason"], sample["engine_finish_reason"]) == ("length", "length")
                assert spans(sample) == [(0, 0, 2)]
        [worker] = made.service.status()["workers"]
        assert (worker["dialect"], worker["engine_version"], worker["model"]) == ("vllm", "0.32.0", "tiny-model")
        assert {"abort_all", "count", "disk", "freeze_keep_kv", "weight_version"} <= set(worker["capabilities"])
        assert (engine.weight_version, len({call.rid for call in engine.requests})) == ("0", 4)
        assert all(len(call.rid) == 32 and call.sampling["max_tokens"] == 16 for call in engine.requests)
        assert engine.requests[0].prompt_ids[:3] == PROMPT


async def test_what_it_is_said_to_be_is_asked_all_the_same() -> None:
    """`dialect: vllm` over another engine is a refusal that says what answered."""
    async with FakeVLLM() as engine, over(engine, worker={"dialect": "sglang"}, ready=False) as made:
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        assert "sglang" in made.worker().reason
        assert "wrong_dialect" in made.worker().reason


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"scale_out": False}, "--enable-scale-out"),
        ({"logprobs_mode": "raw_logits"}, "--logprobs-mode"),
        ({"api_key": "right"}, "unauthorized"),
    ],
)
async def test_an_engine_that_cannot_be_used_says_why(settings: dict[str, Any], named: str) -> None:
    """A switch that is off, and a wrong key, are named; nothing is generated, no prompt is used up."""  # P18 P35
    wrong = {"api_key": "wrong"}
    async with FakeVLLM(**settings) as engine, over(engine, worker=wrong, pushed=1, ready=False) as made:
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        assert named in made.worker().reason
        assert (engine.requests, made.groups("admitted")) == ([], 0)


async def test_a_key_that_changes_costs_no_sample() -> None:
    """401 is the worker's: the sample waits for it to come back."""  # P18 P20
    async with FakeVLLM(api_key="k") as engine, over(engine, worker={"api_key": "k"}, pushed=2) as made:
        await engine.wait_running(2)
        engine.api_key = "other"
        engine.release(fate=Reset())
        await made.until(lambda: made.worker().state is not WorkerState.ACTIVE)
        engine.answer = answered
        engine.api_key = "k"
        assert len((await made.take(groups=2))["groups"]) == 2
        assert not made.of(SampleFailed)


@pytest.mark.parametrize("how", MANGLES)
async def test_an_answer_that_is_none_is_the_samples_failure(how: str) -> None:
    """Redone, and counted; the worker stays in traffic."""  # P4
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.release(fate=Mangled(how))
        await engine.wait_requests(2)
        engine.release(tokens=[1, 2])
        batch = await made.take()
        assert batch["metrics"]["redone"] == 1
        assert made.worker().state is WorkerState.ACTIVE


WORKER_FAULTS: dict[str, Fault] = {
    **{str(code): Status(code) for code in (401, 403, 404, 429, 503)},
    "core dead": Status(500, CORE_DEAD),
    "reset": Reset(),
    "cut": Cut(),
}


@pytest.mark.parametrize("name", WORKER_FAULTS)
async def test_a_worker_that_fails_costs_the_sample_nothing(name: str) -> None:
    """The other takes over under a new wire id, and no attempt is counted."""  # P4 P20
    async with FakeVLLM() as bad, FakeVLLM() as good, over(bad, good, pushed=4) as made:
        await made.until(lambda: bad.running == 2 and good.running == 2)
        good.answer = answered
        good.release()
        for call in list(bad.live):
            bad.finish(call, WORKER_FAULTS[name])
        batch = await made.take(groups=4)
        assert (batch["metrics"]["failed"], batch["metrics"]["redone"]) == ({}, 0)
        rids = [call.rid for call in bad.requests + good.requests]
        assert len(set(rids)) == len(rids) == 6


async def test_a_stream_that_is_cut_keeps_its_tokens() -> None:
    """`stream: true`: what came before the connection broke goes on, under the version of its dispatch."""  # P10
    streams = {"stream": True}
    async with FakeVLLM() as bad, FakeVLLM() as good, over(bad, good, worker=streams, pushed=2) as made:
        await made.until(lambda: bad.running == 1 and good.running == 1)
        bad.answer = good.answer = answered
        good.release(tokens=[5])
        [call] = bad.live
        bad.advance(call, 3)
        bad.finish(call, Cut())
        batch = await made.take(groups=2)
        found = sorted((s for g in batch["groups"] for s in g["samples"]), key=lambda s: len(s["response_ids"]))
        assert [s["response_ids"] for s in found] == [[5], [101, 102, 103, 101, 102]]
        assert [(s["finish_reason"], spans(s)) for s in found] == [
            ("stop", [(0, 0, 1)]),
            ("stop", [(0, 0, 3), (0, 3, 5)]),
        ]
        assert [span.get("confirmed", True) for span in found[1]["weight_versions"]] == [False, True]


# -- stopping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [True, False])
async def test_an_abort_keeps_what_was_made_and_goes_on(cancels: bool) -> None:
    """Running and queued end at once, by one call; after resume each goes on from its prefix."""  # P6 P8 P9 P10
    async with FakeVLLM(slots=2, handler_cancellation=cancels) as engine, over(engine, pushed=4) as made:
        await engine.wait_requests(4)
        report = await made.pause()
        assert (report.clean, engine.live, engine.gauges) == (True, [], (0, 0))
        assert engine.aborts[0] == (ABORT_ALL, {})
        assert report.workers["w0"].residual == 0
        assert made.samples("aborted") == 4
        assert engine.paused is None
        engine.answer = answered
        await made.resume()
        batch = await made.take(groups=4)
        lengths = sorted(len(g["samples"][0]["response_ids"]) for g in batch["groups"])
        assert lengths == [2, 2, 5, 5]
        continued = [call for call in engine.requests[4:] if len(call.prompt_ids) == 7]
        assert [call.max_tokens for call in continued] == [13, 13]


async def test_aborts_by_id_name_the_engines_ids() -> None:
    """Where others use the engine too, each request has the engine's own name for it, behind the key."""  # P15
    async with FakeVLLM(api_key="k1") as engine, over(engine, worker={"exclusive": False}, pushed=2) as made:
        await engine.wait_running(2)
        ids = {call.engine_id for call in engine.live}
        engine.aborts.clear()  # the key was tried on a request that never was
        report = await made.pause()
        assert report.clean
        assert engine.count(ABORT_ALL) == 0
        assert all(path == ABORT and body["request_ids"] for path, body in engine.aborts)
        assert {name for _, body in engine.aborts for name in body["request_ids"]} == ids


async def test_without_development_mode_aborts_go_by_id() -> None:
    """It generates and stops; it is never frozen, and its constant label is no version."""
    async with FakeVLLM(dev_mode=False) as engine, over(engine, pushed=2) as made:
        await engine.wait_running(2)
        report = await made.pause()
        assert (report.clean, engine.count(ABORT) >= 1) == (True, True)
        engine.answer = answered
        await made.resume()
        batch = await made.take(groups=2)
        assert all(span[0] == 0 for group in batch["groups"] for span in spans(group["samples"][0]))


async def test_aborts_that_are_lost_end_with_their_connections() -> None:
    """The engine notices at once that a client has gone: its slot is free, and the pause is clean."""  # P8 P9
    async with FakeVLLM() as engine, over(engine, pushed=3) as made:
        engine.lose_aborts = True
        await engine.wait_running(3)
        report = await made.pause(1.0)
        assert (report.clean, report.workers["w0"].cancelled, engine.running) == (True, 3, 0)
        assert made.samples("aborted") == 3


async def test_waiting_lets_what_runs_finish() -> None:
    """In `wait` the engine is left alone."""
    async with FakeVLLM() as engine, over(engine, pushed=2) as made:
        await engine.wait_running(2)
        pausing = made.start(made.pause(20.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        engine.release(tokens=[1, 2])
        report = await pausing
        assert (report.mode, report.clean, engine.aborts, made.groups("ready")) == ("wait", True, [], 2)


@pytest.mark.parametrize(("kv", "preempted"), [("keep", 0), ("drop", 1)])
async def test_keeping_freezes_and_goes_on(kv: str, preempted: int) -> None:
    """Frozen with its cache or without it; the same request ends after resume."""  # P25
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause(5.0, mode="keep", kv=kv)
        assert (report.mode, report.clean, engine.aborts) == ("keep", True, [])
        assert (engine.paused, engine.frozen, engine.preemptions) == ("keep", 1, preempted)
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1, 2])
        [record] = (await made.take())["groups"][0]["samples"]
        assert (record["response_ids"], len(engine.requests)) == ([1, 2], 1)


async def test_an_abort_joins_a_keep() -> None:
    """What is frozen is aborted where it stands, with what it has."""  # P9
    async with FakeVLLM() as engine, over(engine, pushed=2) as made:
        await engine.wait_running(2)
        assert (await made.pause(5.0, mode="keep")).clean
        report = await made.pause(5.0)
        assert (report.clean, engine.live, made.samples("aborted"), engine.paused) == (True, [], 2, None)


# -- weights -------------------------------------------------------------------------------------------------


async def test_weights_from_disk() -> None:
    """Loaded, its old cache dropped, labelled; tokens made before keep their version."""  # P7 P24 P25
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        updated = await made.service.update_weights(1, DISK, pause={})
        assert updated == {"version": 1, "workers": {"w0": {"ok": True, "version": 1}}}
        assert [body for path, body in engine.updates if path == "/collective_rpc"] == [
            {"method": "reload_weights", "kwargs": {"weights_path": "/weights/1"}}
        ]
        assert (engine.weight_version, engine.weights, engine.count("/reset_prefix_cache")) == ("1", 1, 1)
        await engine.wait_requests(2)
        engine.release(tokens=[7, 8])
        [sample] = (await made.take(step=1))["groups"][0]["samples"]
        assert (spans(sample), engine.stale_reads) == ([(0, 0, 3), (1, 3, 5)], 0)


@pytest.mark.parametrize(("kv", "flushed"), [("keep", 0), ("drop", 1)])
async def test_weights_under_frozen_requests(kv: str, flushed: int) -> None:
    """One answer, two versions; what was asked to stay in the cache stays."""  # P7 P24 P25
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.advance(engine.live[0], 2)
        await made.pause(5.0, mode="keep", kv=kv)
        assert (await made.service.update_weights(1, DISK))["workers"]["w0"]["ok"]
        assert engine.count("/reset_prefix_cache") == flushed
        await made.resume(weight_version=1)
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1, 2, 3, 4])
        [record] = (await made.take(step=1))["groups"][0]["samples"]
        assert spans(record) == [(0, 0, 2), (1, 2, 4)]


async def test_a_failed_load_is_not_hidden_by_its_label() -> None:
    """An engine that lost its weights says it is well: it is out of traffic, until a load went through."""  # P24
    async with FakeVLLM() as one, FakeVLLM() as other, over(one, other, pushed=4) as made:
        await made.until(lambda: one.running == 2 and other.running == 2)
        other.fail_update = True
        ended: list[str] = []
        made.parts.updater.on_half_loaded = lambda worker: ended.append(worker.worker_id)
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, DISK, pause={})
        assert ended == ["w1"]  # where it is ours it is started again
        told = refused.value.detail["workers"]
        assert told["w0"] == {"ok": True, "version": 1}
        assert (told["w1"]["ok"], told["w1"]["version"]) == (False, None)
        assert "Repo id" in told["w1"]["error"]
        assert (other.weight_version, made.worker(1).state) == ("loading 1", WorkerState.QUARANTINED)
        await made.resume()
        await made.until(lambda: one.running in {2, 4})
        assert (len(other.requests), other.dead) == (2, False)
        other.fail_update = False
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)  # the path is loaded again for it
        assert (other.weight_version, other.dead) == ("1", False)


async def test_half_loaded_weights_are_not_taken_for_those_of_the_start() -> None:
    """The first load of all failed, and there is no other: the engine stays out until it was restarted."""  # P24
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK, pause={})
        await made.resume()
        worker = made.worker()
        await made.until(lambda: "restart it" in worker.reason, "it was tried again")
        assert (worker.state, len(engine.requests), engine.dead) == (WorkerState.QUARANTINED, 1, False)
        engine.set_version("default")  # as after a restart
        await made.until(lambda: worker.state is WorkerState.ACTIVE)
        assert engine.weight_version == "0"


@pytest.mark.parametrize("labels", [True, False])
async def test_weights_the_trainer_moved(labels: bool) -> None:
    """Confirmed where the trainer labelled them, labelled where not; caches are dropped."""  # P24 P25
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        engine.load()
        if labels:
            engine.set_version("1")
        updated = await made.service.update_weights(1, EXTERNAL)
        assert updated["workers"]["w0"] == {"ok": True, "version": 1}
        assert (engine.weight_version, engine.cached) == ("1", set())
        engine.answer = answered
        await made.resume(weight_version=1)
        assert (await made.take(step=1))["groups"]
        assert engine.stale_reads == 0


async def test_a_cache_that_is_not_dropped_is_a_failed_update() -> None:
    """200 and `success: false`: vLLM's way to say no."""  # P25
    async with FakeVLLM() as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        engine.script("/reset_prefix_cache", Raw(b'{"success":false}'), times=None)
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK)
        assert engine.weight_version == "loading 1"


# -- death ---------------------------------------------------------------------------------------------------


async def test_a_core_that_dies_and_comes_back() -> None:
    """In flight: 500, and elsewhere at once; back it gets the weights before traffic."""  # P19
    async with FakeVLLM() as bad, FakeVLLM() as good, over(bad, good, pushed=4) as made:
        await made.until(lambda: bad.running == 2 and good.running == 2)
        await made.service.update_weights(1, DISK, pause={})
        await made.until(lambda: bad.running + good.running == 4)
        good.answer = answered
        bad.die()
        await bad.kill()
        good.release(tokens=[1])
        assert len((await made.take(step=1, groups=4))["groups"]) == 4
        assert not made.of(SampleFailed)
        await made.until(lambda: made.worker(0).state is not WorkerState.ACTIVE)
        seen = len(bad.requests)
        bad.answer = answered
        await bad.restart()
        await made.until(lambda: made.worker(0).state is WorkerState.ACTIVE)
        assert (bad.weight_version, bad.weights) == ("1", 2)
        assert [call.prompt_ids for call in bad.requests[seen:]] == [[0]]  # tried with a token, before any traffic


async def test_a_sigterm_costs_no_sample() -> None:
    """Aborts that nobody here asked for keep what was made, and go on elsewhere."""  # P19
    async with FakeVLLM() as bad, FakeVLLM() as good, over(bad, good, pushed=4) as made:
        await made.until(lambda: bad.running == 2 and good.running == 2)
        good.answer = answered
        await bad.terminate()
        good.release(tokens=[1])
        batch = await made.take(groups=4)
        assert len(batch["groups"]) == 4
        assert (batch["metrics"]["failed"], made.of(SampleFailed)) == ({}, [])


async def test_one_that_was_restarted_with_another_switch_is_asked_again_what_it_is() -> None:
    """Out of traffic for its weights, it was mended: what counts is what it can do now."""  # P9 P19
    async with FakeVLLM(dev_mode=False) as engine, over(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK, pause={})
        engine.answer = answered
        await made.resume()
        worker = made.worker()
        worker.put_in_quarantine("version", "an update it cannot take")
        await engine.kill()
        engine.dev_mode = True
        await engine.restart()
        await made.until(lambda: "freeze_keep_kv" in worker.capabilities, "what it can do is known")
        await made.until(lambda: worker.state is WorkerState.ACTIVE)
        assert (engine.weight_version, worker.version) == ("0", 0)
