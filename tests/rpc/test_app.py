"""The control API over a real socket: what each call answers, and how each error looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.events import ProducerWaiting
from rollout_svc.rpc.app import MAX_BODY_BYTES
from rollout_svc.rpc.client import RolloutClient
from rollout_svc.rpc.server import serve_http
from tests.rpc.api import TOKEN, Caller, api
from tests.support.fake_sglang import FakeSGLang, Reply, Status
from tests.support.stage import lines, stage

CALLS = (
    *(("GET", "/v1/status"), ("POST", "/v1/pause"), ("POST", "/v1/resume"), ("POST", "/v1/batches")),
    *(("POST", "/v1/batches/x/ack"), ("POST", "/v1/prompts"), ("POST", "/v1/weights"), ("GET", "/v1/concurrency")),
    *(("PUT", "/v1/concurrency"), ("GET", "/v1/workers"), ("POST", "/v1/workers"), ("DELETE", "/v1/workers/w0")),
    *(("GET", "/metrics"), ("GET", "/v1/stuck"), ("POST", "/v1/checkpoints")),
)
"""Every call but the two that are open."""
BEYOND_A_SCHEMA = {
    ("/v1/prompts", "prompts.0.text"),  # there is no tokenizer
    ("/v1/concurrency", "limits.w7"),  # there is no such worker
    ("/v1/workers", "launch"),  # the service has no token
    ("/v1/workers", ""),  # either key, and not both
    ("/v1/workers", "launch.command"),  # what it has to hold depends on the port
    ("/v1/workers", "api_key"),  # a reference is for a file
    ("/v1/workers", "admin_key"),
}
"""What is refused for reasons that lie outside of the body, or in how its keys go together."""


@pytest.fixture
async def call() -> AsyncIterator[Caller]:
    """Yield an API over one engine that answers at once."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with api(engine) as caller:
            yield caller


async def test_a_checkpoint_without_a_journal_is_refused(call: Caller, tmp_path: Path) -> None:
    """Where nothing survives the answer names the setting."""
    target = tmp_path / "snapshot.db"
    body = {"path": str(target), "step": 0}
    assert (await call.refused("POST", "/v1/checkpoints", body))[:2] == (409, "no_journal")


async def test_the_whole_loop_over_http(call: Caller, tmp_path: Path) -> None:
    """Prompts, batch, ack, pause, weights, resume: a trainer's round, with the records of the service itself."""
    assert await call("POST", "/v1/prompts", {"task": "t", "prompts": lines(2)}) == (200, {"accepted": 2})
    status, batch = await call("POST", "/v1/batches", {"step": 0, "groups": 2, "timeout_s": 10})
    assert (status, len(batch["groups"])) == (200, 2)
    assert await call("POST", "/v1/batches", {"step": 0, "groups": 2, "timeout_s": 10}) == (200, batch)
    assert batch == orjson.loads(orjson.dumps(await call.stage.take(groups=2)))
    acked = await call("POST", f"/v1/batches/{batch['batch_id']}/ack")
    assert acked == (200, {"batch_id": batch["batch_id"], "acknowledged": True})
    status, report = await call("POST", "/v1/pause", {"deadline_s": 2, "lanes": ["train", "eval"], "if_ticket": 0})
    assert (status, report["ticket"], report["clean"]) == (200, 1, True)
    source = {"kind": "disk", "path": str(tmp_path)}
    status, updated = await call("POST", "/v1/weights", {"version": 1, "source": source})
    assert (status, updated) == (200, {"version": 1, "workers": {"w0": {"ok": True, "version": 1}}})
    status, now = await call("POST", "/v1/resume", {"ticket": 1, "weight_version": 1})
    assert (status, now["state"], now["weight_version"]) == (200, "running", 1)
    assert (await call("POST", "/v1/pause"))[0] == 200  # an empty body is `{}`
    assert (await call("POST", "/v1/resume", b""))[0] == 200
    status, text = await call("GET", "/metrics")
    assert status == 200
    assert "rollout" in text
    assert await call("GET", "/healthz") == (200, {"state": "running"})
    assert await call("GET", "/readyz") == (200, {"state": "running"})


async def test_every_call_but_two_wants_the_token() -> None:
    """Without the token, with a wrong one, or in another scheme: 401, and nothing happens."""  # P34
    async with FakeSGLang(weight_version="0") as engine, api(engine, service={"port": 0, "token": TOKEN}) as call:
        wrong = (None, "Bearer wrong", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9")
        for method, path in CALLS:
            for given in wrong:
                headers = {} if given is None else {"Authorization": given}
                status, answer = await call(method, path, headers=headers)
                assert (status, answer["error"]["type"]) == (401, "unauthorized"), (method, path, given)
        assert call.stage.service.status()["ticket"] == 0
        assert (await call("GET", "/nowhere"))[0] == 401
        assert (await call("GET", "/healthz"))[0] == 200
        assert (await call("GET", "/readyz"))[0] == 200
        assert (await call("GET", "/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200


async def test_a_token_of_any_bytes_is_compared() -> None:
    """Bytes that are no text are a wrong token, not a bug of ours."""  # P34
    async with FakeSGLang(weight_version="0") as engine, api(engine, service={"port": 0, "token": TOKEN}) as call:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(call.url.rpartition(":")[2]))
        writer.write(b"GET /v1/status HTTP/1.0\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.split()[1] == b"401"


async def test_what_is_not_there(call: Caller) -> None:
    """Unknown paths, methods, batches, tasks and workers are refused in the one shape of errors."""
    assert await call.refused("GET", "/v1/nowhere") == (404, "not_found", None)
    assert await call.refused("GET", "/v1/pause") == (405, "method_not_allowed", None)
    assert call.headers["Allow"] == "POST"
    assert (await call.refused("POST", "/v1/batches/none/ack"))[:2] == (404, "not_found")
    assert await call.refused("POST", "/v1/prompts", {"task": "x", "prompts": []}) == (
        404,
        "not_found",
        {"tasks": ["t"]},
    )
    assert await call.refused("DELETE", "/v1/workers/w9") == (404, "not_found", {"workers": ["w0"]})


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/v1/pause", {"deadline": 1}, "deadline"),
        ("POST", "/v1/pause", {"deadline_s": "1"}, "deadline_s"),
        ("POST", "/v1/pause", {"deadline_s": 0}, "deadline_s"),
        ("POST", "/v1/pause", {"deadline_s": True}, "deadline_s"),
        ("POST", "/v1/pause", {"lanes": ["tram"]}, "lanes.0"),
        ("POST", "/v1/pause", {"lanes": []}, "lanes"),
        ("POST", "/v1/pause", {"mode": "soft"}, "mode"),
        ("POST", "/v1/pause", {"if_ticket": 1.5}, "if_ticket"),
        ("POST", "/v1/pause", {"kv": "some"}, "kv"),
        ("POST", "/v1/pause", {"offload": ["disk"]}, "offload.0"),
        ("POST", "/v1/resume", {"ticket": "1"}, "ticket"),
        ("POST", "/v1/resume", {"weight_version": -1}, "weight_version"),
        ("POST", "/v1/batches", {"groups": 1}, "step"),
        ("POST", "/v1/batches", {"step": 0, "groups": 0}, "groups"),
        ("POST", "/v1/batches", {"step": -1, "groups": 1}, "step"),
        ("POST", "/v1/batches", {"step": 0, "groups": 1, "timeout_s": -1}, "timeout_s"),
        ("POST", "/v1/batches", {"step": 0, "groups": 1, "ack": "b"}, "ack"),
        ("POST", "/v1/batches", {"step": 0, "groups": 1, "ack": [1]}, "ack.0"),
        ("POST", "/v1/batches/b/ack", {"x": 1}, "x"),
        ("POST", "/v1/prompts", {"task": "t"}, "prompts"),
        ("POST", "/v1/prompts", {"task": "t", "prompts": [{"input_ids": [1]}, 7]}, "prompts.1"),
        ("POST", "/v1/prompts", {"task": "t", "prompts": [{"input_ids": [1, "2"]}]}, "prompts.0.input_ids"),
        ("POST", "/v1/prompts", {"task": "t", "prompts": [{"text": "no tokenizer"}]}, "prompts.0.text"),
        ("POST", "/v1/prompts", {"task": "t", "prompts": [{}]}, "prompts.0"),
        ("POST", "/v1/weights", {"version": 1}, "source"),
        ("POST", "/v1/weights", {"version": "1", "source": {"kind": "external"}}, "version"),
        ("POST", "/v1/weights", {"version": 1, "source": {}}, "source.kind"),
        ("POST", "/v1/weights", {"version": 1, "source": {"kind": "magic"}}, "source.kind"),
        ("POST", "/v1/weights", {"version": 1, "source": {"kind": "disk"}}, "source.path"),
        ("POST", "/v1/weights", {"version": 1, "source": {"kind": "external"}, "pause": {"x": 1}}, "pause.x"),
        ("PUT", "/v1/concurrency", {"trainer": {"train_batch_size": "8"}}, "trainer.train_batch_size"),
        ("PUT", "/v1/concurrency", {"trainer": {"batch": 8}}, "trainer.batch"),
        ("PUT", "/v1/concurrency", {"limits": {"w0": 0}}, "limits.w0"),
        ("PUT", "/v1/concurrency", {"limits": {"w7": 1}}, "limits.w7"),
        ("POST", "/v1/checkpoints", {"path": "", "step": 1}, "path"),
        ("POST", "/v1/checkpoints", {"path": "/s.db", "step": -1}, "step"),
        ("POST", "/v1/workers", {}, ""),
        ("POST", "/v1/workers", {"launch": {"command": ["true", "{port}"]}}, "launch"),
        ("POST", "/v1/workers", {"launch": {"command": ["true"]}}, "launch.command"),
        ("POST", "/v1/workers", {"url": "ftp://x"}, "url"),
        ("POST", "/v1/workers", {"url": "http://x", "dialect": "sglangg"}, "dialect"),
        ("POST", "/v1/workers", {"url": "http://x", "api_key": "${HOME}"}, "api_key"),
        ("POST", "/v1/workers", {"url": "http://x", "admin_key": "a-${KEY}-b"}, "admin_key"),
    ],
)
async def test_a_bad_body_is_refused_at_its_field(call: Caller, method: str, path: str, body: Any, field: str) -> None:
    """400 with the dotted path of what is wrong, and nothing has happened."""  # P35
    before = call.stage.service.status() | {"rss_bytes": 0}
    status, kind, detail = await call.refused(method, path, body)
    assert (status, kind) == (400, "bad_request")
    [problem] = detail  # one mistake, one problem
    assert set(problem) == {"path", "message"}
    assert problem["path"] == field
    assert "tuple" not in problem["message"]
    said = bool(call.described.faults_of_body(method, path, body))  # by `/openapi.json`, which cannot know the fleet
    assert said != ((path, field) in BEYOND_A_SCHEMA)
    assert call.stage.service.status() | {"rss_bytes": 0} == before


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[]", b"null", b"3", b'"x"', b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(call: Caller, body: bytes) -> None:
    """Whatever is sent, the answer is a 400 in the one shape."""  # P35
    for method, path in CALLS:
        if method in {"POST", "PUT"}:
            status, kind, _ = await call.refused(method, path, body)
            assert (status, kind) == (400, "bad_request"), path


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("older_than_s=-1", "older_than_s"),
        ("older_than_s=nan", "older_than_s"),
        ("older_than_s=1e999", "older_than_s"),
        ("older_than_s=", "older_than_s"),
        ("older_than_s=soon", "older_than_s"),
        ("older_than_s=1&older_than_s=2", "older_than_s"),
        ("older=1", "older"),
    ],
)
async def test_a_question_that_cannot_be_asked_is_refused(call: Caller, query: str, path: str) -> None:
    """400 with the name of what is wrong in the address."""  # P35
    status, kind, detail = await call.refused("GET", f"/v1/stuck?{query}")
    assert (status, kind, [problem["path"] for problem in detail]) == (400, "bad_request", [path])


async def test_who_is_stuck_over_http() -> None:
    """The record of `GET /v1/stuck`, by the address and by the client: the same as the service's own."""  # P22
    async with (
        FakeSGLang(weight_version="0") as engine,
        api(engine, pushed=1) as call,
        RolloutClient(call.url) as client,
    ):
        await engine.wait_running(1)
        status, record = await call("GET", "/v1/stuck?older_than_s=0")
        assert status == 200
        assert (record["older_than_s"], record["counts"], record["omitted"]) == (0.0, {"generating": 1}, 0)
        [sample] = record["samples"]
        assert (sample["worker"], sample["where"]) == ("w0", "generating")
        assert (await client.stuck(0))["samples"][0]["sample_id"] == sample["sample_id"]
        assert (await client.stuck(1e18))["counts"] == {}
        assert (await call("GET", "/v1/stuck"))[1]["older_than_s"] == call.stage.service.config.pause.deadline_s
        with pytest.raises(BadRequest):
            await client.stuck(float("nan"))


async def test_a_launch_names_no_variable_of_the_service() -> None:
    """What a configuration file may read from the service's environment, its callers may not."""  # P34
    launch = {"command": ["true", "{port}"], "env": {"WORD": "word", "SECRET": "${HOME}"}}
    async with FakeSGLang(weight_version="0") as engine, api(engine, service={"port": 0, "token": TOKEN}) as call:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        status, answer = await call("POST", "/v1/workers", {"launch": launch}, headers=headers)
        [problem] = answer["error"]["detail"]
        assert (status, problem["path"]) == (400, "launch.env.SECRET")
        assert len(call.stage.service.workers()) == 1


async def test_every_problem_of_a_body_is_named_at_once(call: Caller) -> None:
    """Two faults, two problems."""  # P35
    _, _, detail = await call.refused("POST", "/v1/batches", {"step": -1, "groups": "x", "typo": 1})
    assert sorted(problem["path"] for problem in detail) == ["groups", "step", "typo"]


async def test_a_body_beyond_the_cap_is_refused(call: Caller) -> None:
    """413 before it is decoded."""  # P34
    status, answer = await call("POST", "/v1/prompts", data=BytesIO(b" " * (MAX_BODY_BYTES + 1)))
    assert (status, answer["error"]["type"]) == (413, "too_large")


async def test_wrong_states_are_conflicts(call: Caller) -> None:
    """Old tickets, weights while running, prompts to the wrong task: 409 with both sides."""
    assert await call.refused("POST", "/v1/pause", {"if_ticket": 5}) == (
        409,
        "stale_ticket",
        {"if_ticket": 5, "current": 0},
    )
    assert (await call.refused("POST", "/v1/resume", {"ticket": 5}))[:2] == (409, "stale_ticket")
    weights = {"version": 1, "source": {"kind": "external"}}
    assert (await call.refused("POST", "/v1/weights", weights))[:2] == (409, "not_paused")
    weights["pause"] = {"lanes": ["train"]}
    assert await call.refused("POST", "/v1/weights", weights) == (409, "not_drained", {"lanes": ["eval"]})
    assert (await call("GET", "/v1/status"))[1]["state"] == "running"
    await call("POST", "/v1/pause", {"lanes": ["train"]})
    del weights["pause"]
    assert await call.refused("POST", "/v1/weights", weights) == (409, "not_drained", {"lanes": ["eval"]})
    engine = call.stage.service.config.workers[0].url
    assert (await call.refused("POST", "/v1/workers", {"url": engine}))[:2] == (409, "duplicate")


async def test_what_cannot_be_now_says_when_to_ask_again(call: Caller) -> None:
    """503 with `Retry-After` and the type of the shortage."""  # P22
    body = {"step": 0, "groups": 1, "timeout_s": 0.01}
    assert (await call.refused("POST", "/v1/batches", body))[:2] == (503, "not_enough")
    assert call.headers["Retry-After"] == "1"
    await call("POST", "/v1/pause")
    assert (await call.refused("POST", "/v1/batches", body))[:2] == (503, "paused")


async def test_a_failed_update_is_a_503_with_its_workers() -> None:
    """The odd ones are in `detail.workers`, and the stage stays paused."""  # P24
    async with FakeSGLang(weight_version="0") as engine, api(engine) as call:
        engine.script("/update_weights_from_disk", Status(500), times=None)
        body = {"version": 1, "source": {"kind": "disk", "path": "/w"}, "pause": {"deadline_s": 1}}
        status, kind, detail = await call.refused("POST", "/v1/weights", body)
        assert (status, kind, list(detail["workers"])) == (503, "update_failed", ["w0"])
        assert (await call("GET", "/readyz"))[1] == {"state": "paused"}


async def test_while_engines_load_the_api_is_up_and_not_ready() -> None:
    """`/readyz` is 503 and status says `starting`; calls that need the engines are refused as that."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.script("/model_info", Status(503), times=2)
        async with api(engine, ready=False) as call:
            assert await call("GET", "/readyz") == (503, {"state": "starting"})
            assert await call("GET", "/healthz") == (200, {"state": "starting"})
            assert (await call("GET", "/v1/status"))[1]["state"] == "starting"
            assert (await call.refused("POST", "/v1/pause"))[:2] == (503, "starting")
            assert (await call.refused("POST", "/v1/resume"))[:2] == (503, "starting")
            assert await call("POST", "/v1/prompts", {"task": "t", "prompts": lines(1)}) == (200, {"accepted": 1})
            await call.stage.service.ready()
            assert await call("GET", "/readyz") == (200, {"state": "running"})


async def test_a_caller_that_leaves_ends_only_its_own_wait() -> None:
    """A take whose client has gone leases nothing; a pause whose client has gone goes on."""  # P14
    async with FakeSGLang(weight_version="0") as engine, api(engine, pushed=1) as call:
        made = call.stage
        await engine.wait_running(1)
        engine.lose_aborts = True
        body = {"step": 0, "groups": 1, "timeout_s": 60}
        leaving = [made.start(call("POST", "/v1/batches", body)), made.start(call("POST", "/v1/pause"))]
        await engine.wait_aborts(1)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        await made.until(lambda: not made.parts.batches._takers or made.service.state == "paused")
        engine.lose_aborts = False
        assert (await call("POST", "/v1/pause"))[1]["ticket"] == 1
        engine.answer = lambda _: Reply(tokens=1)
        await call("POST", "/v1/resume")
        status, batch = await call("POST", "/v1/batches", body)
        assert (status, len(batch["groups"])) == (200, 1)


async def test_the_fleet_can_grow_and_shrink(call: Caller) -> None:
    """A worker is added as configured, listed, limited, and removed; the plan follows."""
    async with FakeSGLang(weight_version="0") as other:
        other.answer = lambda _: Reply(tokens=2)
        status, added = await call("POST", "/v1/workers", {"url": other.url, "max_batch": 10})
        assert (status, added["id"], added["url"]) == (201, "w1", other.url)
        await call.stage.until(lambda: call.stage.worker(1).state == "ACTIVE")
        status, listed = await call("GET", "/v1/workers")
        assert [worker["id"] for worker in listed["workers"]] == ["w0", "w1"]
        assert (await call("GET", "/v1/concurrency"))[1]["workers"] == 2
        status, plan = await call("PUT", "/v1/concurrency", {"limits": {"w1": 3}})
        assert (status, plan["allowed"]) == (200, 3)
        assert await call("DELETE", "/v1/workers/w1") == (202, {"id": "w1", "state": "DRAINING"})
        await call.stage.until(lambda: "w1" not in call.stage.parts.pool.workers)
        assert (await call("GET", "/v1/concurrency"))[1]["workers"] == 1


async def test_a_port_in_use_is_a_configuration_error() -> None:
    """The second service on a port says which setting is wrong."""  # P35
    async with FakeSGLang(weight_version="0") as engine, stage(engine, service={"port": engine.port}) as made:
        with pytest.raises(ConfigError, match=r"service\.port: cannot bind"):
            async with serve_http(made.service):
                raise AssertionError


async def test_numbers_that_are_none_never_leave(call: Caller) -> None:
    """The answers are JSON to the letter: no NaN, no Infinity."""
    await call.stage.push(1)
    await call.stage.take()
    for path in ("/v1/status", "/v1/concurrency", "/v1/workers"):
        async with call.session.get(call.url + path) as response:
            text = await response.text()
            assert json.loads(text, parse_constant=pytest.fail)


async def test_a_body_that_is_not_in_its_encoding_is_a_bad_request(call: Caller) -> None:
    """A broken gzip is the caller's fault: 400 in the contract's shape, and no traceback of ours."""  # P35
    host, port = call.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ("POST /v1/resume HTTP/1.1", "Host: x", "Content-Encoding: gzip", "Content-Length: 4", "Connection: close")
    writer.write("\r\n".join((*head, "", "junk")).encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"type":"bad_request"' in answer
    assert (await call("GET", "/v1/status"))[0] == 200


async def test_a_fleet_that_is_down_is_told_in_status_and_metrics() -> None:
    """No worker in traffic: status and metrics say what the producer waits for, and an event says it once."""  # P18
    async with FakeSGLang(weight_version="0") as engine, api(engine, pushed=3) as call:
        made = call.stage
        await engine.wait_running(1)
        await engine.kill()
        await made.until(lambda: made.parts.producer.waiting == "no_worker")
        status, record = await call("GET", "/v1/status")
        assert (status, record["producer"]["waiting_for"]) == (200, "no_worker")
        _, text = await call("GET", "/metrics")
        assert 'rollout_producer_waiting{reason="no_worker"} 1.0' in text
        assert 'rollout_service_state{state="running"} 1.0' in text
        assert [event.reason for event in made.of(ProducerWaiting)][-1:] == ["no_worker"]
        admitted = made.parts.ledger.as_json()["groups"]["admitted"]
        await engine.restart()
        await engine.wait_running(1)
        assert made.parts.ledger.as_json()["groups"]["admitted"] == admitted


async def test_metrics_tell_of_pauses() -> None:
    """Each pause is counted by mode and outcome, and what it abandoned is summed."""
    async with FakeSGLang(weight_version="0") as engine, api(engine, pushed=1) as call:
        await engine.wait_running(1)
        engine.lose_aborts = True
        engine.loads = (1, 0)
        status, report = await call("POST", "/v1/pause", {"deadline_s": 0.3})
        assert (status, report["clean"]) == (200, False)
        _, text = await call("GET", "/metrics")
        assert 'rollout_pause_seconds_count{clean="false",mode="abort"} 1.0' in text
        assert "rollout_pause_abandoned_total 1.0" in text
        assert 'rollout_worker_state{state="QUARANTINED",worker="w0"} 1.0' in text
        assert 'rollout_service_state{state="paused"} 1.0' in text
