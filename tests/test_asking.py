"""Asking engines what they are: all at once, under one deadline, and nothing changes there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_svc.asking import ask_engines, preflight
from rollout_svc.engines import EngineProfile, HttpTransport
from rollout_svc.errors import ADMIN_KEY, WorkerFailure
from rollout_svc.plan import make_plan
from rollout_svc.preflight import Answer
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang, Hang, Status
from tests.support.fake_vllm import FakeVLLM
from tests.support.stage import make_config, stage


async def asked(*engines: Any, deadline_s: float = 10.0) -> list[Answer]:
    """Ask engines, in order."""
    async with HttpTransport() as transport:
        return list((await ask_engines(make_config(*engines), transport, deadline_s)).values())


def kind(answer: Answer) -> str:
    """Say how an engine failed to answer."""
    assert isinstance(answer, WorkerFailure), answer
    return answer.kind


async def test_every_engine_is_asked_and_named() -> None:
    """Those that answer with what they are, the others with why not, in the order of the configuration."""
    async with FakeSGLang(weight_version="3", model_path="/m/tiny") as good, FakeSGLang() as dead:
        await dead.refuse()
        first, second = await asked(good, dead)
    assert isinstance(first, EngineProfile)
    assert (first.dialect, first.model, first.weight_label) == ("sglang", "/m/tiny", "3")
    assert kind(second) == "connection"


async def test_keys_that_are_refused_are_told_apart() -> None:
    """The key of the data routes, and the key of the control routes: each is tried before anything needs it."""
    async with FakeSGLang(api_key="data", admin_key="admin") as engine:
        both = {"url": engine.url, "api_key": "data", "admin_key": "admin"}
        [answer] = await asked(both)
        assert isinstance(answer, EngineProfile)
        assert [kind(answer) for answer in await asked(both | {"api_key": "wrong"})] == ["unauthorized"]
        assert [kind(answer) for answer in await asked({"url": engine.url})] == ["unauthorized"]
        assert [kind(answer) for answer in await asked(both | {"admin_key": "wrong"})] == [ADMIN_KEY]
        assert [kind(answer) for answer in await asked(both | {"admin_key": None})] == [ADMIN_KEY]


async def test_another_engine_is_recognised() -> None:
    """A server that answers, and not as the dialect it was configured to be."""
    async with FakeSGLang() as engine:
        engine.script("/model_info", Status(404), times=None)
        assert [kind(answer) for answer in await asked({"url": engine.url, "dialect": "sglang"})] == ["wrong_dialect"]


Engine = FakeSGLang | FakeVLLM | FakeLMDeploy


@pytest.mark.parametrize("make", [FakeSGLang, FakeVLLM, FakeLMDeploy])
async def test_each_kind_of_engine_is_recognised_and_left_alone(
    make: Callable[[], Engine],
) -> None:
    """Asked as whatever it is, and as each of the others; a generation that runs meanwhile runs on."""
    names = {FakeSGLang: "sglang", FakeVLLM: "vllm", FakeLMDeploy: "lmdeploy"}
    async with make() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        right = names[type(engine)]
        said = {name: (await asked({"url": engine.url, "dialect": name}))[0] for name in names.values()}
        profile = said.pop(right)
        assert isinstance(profile, EngineProfile)
        assert profile.dialect == right
        assert [kind(answer) for answer in said.values()] == ["wrong_dialect"] * 2
        assert engine.running == 1
        engine.release(tokens=1)
        await made.until(lambda: made.groups("ready") == 1)


async def test_a_switch_that_is_off_is_named() -> None:
    """An engine that was started without what it needs is told apart from one that cannot be reached."""
    async with FakeVLLM(scale_out=False) as vllm, FakeLMDeploy(abort_handling=False) as lmdeploy:
        answers = await asked(vllm, lmdeploy)
    assert [kind(answer) for answer in answers] == ["unfit", "unfit"]
    assert "--enable-scale-out" in str(answers[0])
    assert "--enable-abort-handling" in str(answers[1])


async def test_a_mixed_fleet_is_told_what_each_of_it_lacks() -> None:
    """One configuration over three kinds of engine: what one of them cannot do is a problem, with its name."""
    async with FakeSGLang() as sglang, FakeVLLM(api_key="k") as vllm, FakeLMDeploy() as lmdeploy:
        engines = (sglang, {"url": vllm.url, "api_key": "k"}, lmdeploy)
        config = make_config(*engines, pause={"mode": "keep"}, sampling={"max_tokens": 16, "seed": 1})
        report = await preflight(config, make_plan(config.trainer, [None] * 3))
    assert [worker["dialect"] for worker in report["workers"]] == ["sglang", "vllm", "lmdeploy"]
    named = {(problem["path"], problem["message"].partition(" at ")[0]) for problem in report["problems"]}
    assert {("pause.mode", "w2"), ("tasks.0.sampling", "w2")} <= named
    assert not {worker for path, worker in named if worker != "w2" and path != "workers.1.url"}
    assert ("workers.1.url", "w1") in {(w["path"], w["message"].partition(" at ")[0]) for w in report["warnings"]}


async def test_a_silent_engine_costs_the_others_nothing() -> None:
    """One that never answers is named when the deadline is over; the other is there with its answer."""
    async with FakeSGLang() as good, FakeSGLang() as silent:
        silent.script("/model_info", Hang(), times=None)
        started = asyncio.get_running_loop().time()
        first, second = await asked(good, silent, deadline_s=0.5)
        assert asyncio.get_running_loop().time() - started < 2
        assert isinstance(first, EngineProfile)
        assert kind(second) == "control_timeout"
        assert "within 0.5 s" in str(second)


async def test_nothing_changes_at_an_engine_that_works() -> None:
    """Asked in the middle of its work for somebody else: what it runs runs on, and it is told to change nothing."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2) as made:
        await engine.wait_running(2)
        before, hits = engine.weight_version, len(engine.hits)
        [answer] = await asked(engine)
        assert isinstance(answer, EngineProfile)
        assert (engine.running, engine.paused, engine.weight_version) == (2, None, before)
        changing = {path for method, path in engine.hits[hits:] if method != "GET"}
        assert changing == {"/abort_request"}  # of a request that never was: it tells whether the control key fits
        engine.release(tokens=1)
        await made.until(lambda: made.groups("ready") == 2)


async def test_a_fleet_of_nobody_is_a_fleet() -> None:
    """No workers: nothing to ask, nothing that fails, and the plan says so."""
    config = make_config()
    report = await preflight(config, make_plan(config.trainer, {}))
    assert (report["ok"], report["workers"], report["problems"]) == (True, [], [])
    assert "no workers" in report["plan"]["warnings"][0]


async def test_the_record_of_a_preflight() -> None:
    """Who answered what, who did not, the plan with each limit, and the lines."""
    async with FakeSGLang(weight_version="0") as good, FakeSGLang() as dead:
        await dead.refuse()
        config = make_config(good, dead, sampling={"temperature": 0.5, "max_tokens": 1_000_000})
        report = await preflight(config, make_plan(config.trainer, {"w0": 7, "w1": None}))
    assert report["ok"] is False
    first, second = report["workers"]
    assert (first["id"], first["dialect"], first["failure"]) == ("w0", "sglang", None)
    assert [worker["limit"] for worker in report["workers"]] == [9, 77]
    assert {"abort", "count"} <= set(first["capabilities"])
    assert second.keys() == {"id", "url", "limit", "failure", "launched"}
    assert second["failure"].startswith("connection: ")
    assert [problem["path"] for problem in report["problems"]] == ["workers.1.url"]
    assert [warning["path"] for warning in report["warnings"]] == ["tasks.0.sampling.max_tokens", "tasks.0.sampling"]


async def test_asking_can_be_cancelled() -> None:
    """Whoever asks may go away: the questions end with it."""  # P14
    async with FakeSGLang() as silent, HttpTransport() as transport:
        silent.script("/model_info", Hang(), times=None)
        asking = asyncio.ensure_future(ask_engines(make_config(silent), transport))
        await silent.wait_hits("/model_info", 1)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
