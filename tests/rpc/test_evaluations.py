"""`POST /v1/evaluations` over a real socket, and the clients that call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollout_svc.errors import Conflict, NotNow
from rollout_svc.rpc.blocking import SyncRolloutClient
from rollout_svc.rpc.client import RolloutClient
from tests.rpc.api import Caller, api
from tests.support.fake_sglang import FakeSGLang, Reply, Status
from tests.support.stage import TASK, lines

PATH = "/v1/evaluations"


@pytest.fixture
async def engine() -> AsyncIterator[FakeSGLang]:
    """Yield an engine that holds what it is asked."""
    async with FakeSGLang(weight_version="0", report_spans=True) as made:
        yield made


@pytest.fixture
async def call(engine: FakeSGLang) -> AsyncIterator[Caller]:
    """Yield an API over that engine."""
    async with api(engine) as caller:
        yield caller


def body(count: int = 1, **more: Any) -> dict[str, Any]:
    """A good body."""
    return {"task": TASK, "prompts": lines(count), "timeout_s": 5.0} | more


async def test_the_answer_is_the_described_one(engine: FakeSGLang, call: Caller) -> None:
    """Groups in order, one sample each; one that failed says so, without a reward."""  # P2
    engine.answer = lambda asked: Status(400) if asked.prompt_ids[-1] == 1 else Reply(tokens=[1, 2])
    status, answer = await call("POST", PATH, body(3, sampling={"temperature": 0.0}, version=0))
    assert status == 200
    assert [group["prompt"]["id"] for group in answer["groups"]] == ["p0", "p1", "p2"]
    [[good], [bad], _] = [group["samples"] for group in answer["groups"]]
    assert (good["status"], good["response_ids"]) == ("COMPLETED", [1, 2])
    assert (bad["status"], bad["reward"]) == ("FAILED", None)
    _, status_record = await call("GET", "/v1/status")
    assert status_record["evaluations"]["ledger"]["groups"]["consumed"] == 2
    assert status_record["ledger"]["groups"]["admitted"] == 0
    _, metrics = await call("GET", "/metrics")
    assert 'rollout_evaluations_total{outcome="answered"} 1.0' in metrics
    assert 'rollout_evaluation_ledger{account="failed",unit="groups"} 1.0' in metrics


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [{"input_ids": []}]}, "prompts.0.input_ids"),
        ({"prompts": "p"}, "prompts"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"sampling": {"more": 2}}, "sampling.more"),
        ({"version": -1}, "version"),
        ({"timeout_s": None}, "timeout_s"),
        ({"more": 1}, "more"),
    ],
)
async def test_a_bad_body_is_refused_at_its_path(call: Caller, change: dict[str, Any], path: str) -> None:
    """P35: 400 with the path of the field, and nothing is admitted."""
    status, kind, detail = await call.refused("POST", PATH, body() | change)
    assert (status, kind) == (400, "bad_request")
    assert [problem["path"] for problem in detail] == [path]
    assert call.stage.parts.evaluations.ledger.as_json()["groups"]["admitted"] == 0


async def test_what_has_to_be_said_has_to_be_said(call: Caller) -> None:
    """P35: an evaluation without an end is refused."""
    given = {key: value for key, value in body().items() if key != "timeout_s"}
    assert (await call.refused("POST", PATH, given))[0] == 400


async def test_refusals_by_state(engine: FakeSGLang, call: Caller) -> None:
    """An unknown task 404, another version 409, too little time 503, a paused lane 503; each says what it found."""
    assert (await call.refused("POST", PATH, body(task="other")))[:2] == (404, "not_found")
    refused = await call.refused("POST", PATH, body(version=3))
    assert refused == (409, "weight_version", {"version": 3, "weight_version": 0})
    status, kind, detail = await call.refused("POST", PATH, body(2, timeout_s=0.2))
    assert (status, kind, detail["finished"], detail["wanted"]) == (503, "not_enough", 0, 2)
    assert call.headers["Retry-After"]
    await engine.wait_idle()
    await call("POST", "/v1/pause", {"lanes": ["eval"], "deadline_s": 2})
    assert (await call.refused("POST", PATH, body(timeout_s=0.1)))[:2] == (503, "paused")


async def test_a_caller_that_hangs_up_ends_its_evaluation(engine: FakeSGLang, call: Caller) -> None:
    """The connection closes: its requests are aborted at the engine, and nothing of it is left."""  # P14
    asking = asyncio.get_running_loop().create_task(call("POST", PATH, body(2)))
    await engine.wait_running(2)
    asking.cancel()
    await asyncio.wait({asking})
    await engine.wait_idle()
    await call.stage.until(lambda: not call.stage.parts.evaluations._open)
    assert call.stage.parts.evaluations.ledger.groups("expired") == 2


async def test_the_clients_evaluate(engine: FakeSGLang, call: Caller) -> None:
    """Both clients return the groups, and raise what the service refused."""
    engine.answer = lambda _: Reply(tokens=[1])
    async with RolloutClient(call.url) as client:
        answer = await client.evaluate(TASK, lines(2), sampling={"max_tokens": 3}, version=0, timeout_s=5.0)
        assert [group["samples"][0]["status"] for group in answer["groups"]] == ["COMPLETED"] * 2
        with pytest.raises(Conflict):
            await client.evaluate(TASK, lines(1), version=9, timeout_s=5.0)

    def blocking() -> dict[str, Any]:
        with SyncRolloutClient(call.url) as client:
            return client.evaluate(TASK, lines(1), timeout_s=5.0)

    assert len((await asyncio.to_thread(blocking))["groups"]) == 1
    engine.answer = None
    async with RolloutClient(call.url) as client:
        with pytest.raises(NotNow) as late:
            await client.evaluate(TASK, lines(1), timeout_s=0.1)
        assert late.value.type == "not_enough"
