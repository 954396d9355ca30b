"""Agents that speak an API, over the real service: who gets in, what becomes of their samples."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import ConfigError
from rollout_svc.observe.metrics import Metrics
from rollout_svc.rpc import app, session_calls
from rollout_svc.sessions import registry
from rollout_svc.sessions.session import Session
from tests.support.fake_sglang import FakeSGLang, Reply, Status
from tests.support.session_site import SESSION, asked, ids, session_site
from tests.support.stage import stage

HI = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_LOOK_S", 0.02)


async def test_an_agent_elsewhere_has_its_turns_and_a_sample_comes_of_them() -> None:
    """P6: what it was told is what is trained on, as token ids, with a mask and a reward."""
    async with session_site() as site:
        site.engine.answer = lambda call: Reply(tokens=ids("yo" if len(call.prompt_ids) < 15 else "ok"))
        client = site.client()
        told = await client.take()
        assert told["base_url"] == f"{site.url}/sessions/{told['session_id']}/v1"
        assert (told["prompt"], told["ground_truth"]) == ([HI], 0)
        assert await client.say("hi") == "yo"
        assert await client.say("on") == "ok"
        assert asked(site.engine) == "<u>hi;<a>yo;<u>on;<a>"
        noted = await client.post(f"/sessions/{client.session_id}/reward", {"reward": 0.25})
        assert noted == (200, {"session_id": client.session_id, "reward": 0.25})
        assert (await client.end())[0] == 200
        [group] = (await site.stage.take())["groups"]
        [sample] = group["samples"]
        assert sample["prompt_ids"] == ids("<u>hi;<a>")
        assert sample["response_ids"] == ids("yo;<u>on;<a>ok")
        assert sample["loss_mask"] == [1] * 2 + [0] * len(";<u>on;<a>") + [1] * 2
        assert sample["meta"]["reported_reward"] == 0.25
        assert (await client.chat(HI))[0] == 410
        assert (site.figures["open"], site.figures["turns"]) == (0, 2)


async def test_a_key_opens_its_session_and_no_other() -> None:
    """P34: not another session's, not another service's token, not none; Anthropic's header carries it too."""
    token = {"port": 0, "token": "s3cret"}
    async with session_site(2, service=token) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        one, other = await site.taken(), await site.taken()
        key = one.headers["Authorization"].removeprefix("Bearer ")
        for headers in ({}, other.headers, {"Authorization": "Bearer another"}, {"x-api-key": "\udcff"[:0]}):
            one.headers = headers
            assert (await one.chat(HI))[0] == 401
            assert (await one.end())[0] == 401
        one.headers = {"x-api-key": key}
        assert (await one.chat(HI))[0] == 200
        one.headers = {"Authorization": "Bearer s3cret"}
        assert (await one.chat(HI))[0] == 200
        one.session_id = "nobody"
        assert (await one.chat(HI))[0] == 404
        one.headers = other.headers
        assert (await one.chat(HI))[0] == 401
        one.headers = {}
        assert (await one.post("/sessions", {"task": "t"}))[0] == 401


async def test_nobody_waits_for_an_agent() -> None:
    """P15: 503 and when to ask again; an unknown task is 404."""
    async with session_site(0) as site:
        client = site.client()
        status, answer = await client.post("/sessions", {"task": "t", "wait_s": 0.05})
        assert (status, answer["error"]["type"], client.retry_after) == (503, "no_sample", "1")
        assert (await client.post("/sessions", {"task": "u"}))[0] == 404
        waiting = site.stage.start(client.take())
        await site.stage.push([{"messages": [HI]}])
        assert (await waiting)["prompt"] == [HI]


async def test_a_client_that_leaves_takes_its_turn_with_it() -> None:
    """P15: the engine call is aborted at once, nothing of it is left, and the session goes on."""
    async with session_site() as site:
        client = await site.taken()
        for stream in (False, True):
            going = site.stage.start(client.chat(HI, stream=stream))
            await site.engine.wait_running(1)
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
            await site.engine.wait_idle()
        await site.until(cancelled_turns=2)
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        assert await client.say("hi") == "yo"
        assert [call.prompt_ids for call in site.engine.requests] == [ids("<u>hi;<a>")] * 3
        await client.end()
        [group] = (await site.stage.take())["groups"]
        assert group["samples"][0]["response_ids"] == ids("yo")
        assert "earlier_segments" not in group["samples"][0]


async def test_a_turn_waits_for_the_end_of_a_pause_or_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: 503 with Retry-After after `hold_s`, in a stream too; the agent is parked, and the pause clean."""
    monkeypatch.setattr(session_calls, "_WARM_S", 0.02)
    async with session_site(sessions={"hold_s": 0.1}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        client = await site.taken()
        report = await site.stage.pause()
        assert (report.clean, len(report.parked)) == (True, 1)
        for stream in (False, True):
            status, answer = await client.chat(HI, stream=stream)
            assert (status, answer["error"]["code"], client.retry_after) == (503, "paused", "1")
        assert not site.engine.requests
        await site.stage.resume()
        assert await client.say("hi") == "yo"


async def test_a_stream_is_kept_warm_and_is_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments while the engine works, then the words, the reason, the usage and the end."""
    monkeypatch.setattr(session_calls, "_WARM_S", 0.02)
    async with session_site() as site:
        client = await site.taken()
        going = site.stage.start(client.chat(HI, stream=True, stream_options={"include_usage": True}))
        await site.engine.wait_running(1)
        await asyncio.wait({going}, timeout=0.1)
        site.engine.release(tokens=ids("yo"))
        status, text = await going
        assert status == 200
        assert text.startswith(": ")
        assert '"content":"yo"' in text
        assert '"completion_tokens":2' in text
        assert text.endswith("data: [DONE]\n\n")


async def test_what_a_turn_was_refused_for_is_told_in_the_words_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: a bad body, a bad answer; in a stream that has begun, as its last event."""
    monkeypatch.setattr(session_calls, "_WARM_S", 0.02)
    async with session_site() as site:
        client = await site.taken()
        assert (await client.chat())[0] == 400
        status, answer = await client.post(f"/sessions/{client.session_id}/v1/messages", {"messages": 1})
        assert (status, answer["type"]) == (400, "error")
        going = site.stage.start(client.chat(HI, stream=True))
        await site.engine.wait_running(1)
        await asyncio.wait({going}, timeout=0.1)
        site.engine.release(fate=Status(400, "no"))
        status, text = await going
        assert status == 200
        assert '"error":{' in text.splitlines()[-2]
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        assert await client.say("hi") == "yo"


async def test_a_body_that_is_no_json_names_no_field() -> None:
    """P35: as the control API says it."""
    async with session_site() as site:
        client = await site.taken()
        url = f"{client.url}/sessions/{client.session_id}/v1/chat/completions"
        async with client.http.post(url, data=b"{", headers=client.headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, None)
        assert error["message"].startswith("the body is not JSON: ")


async def test_too_much_is_refused_in_the_words_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: a body beyond the bound, for either API."""
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1024)
    async with session_site() as site:
        client = await site.taken()
        big = {"messages": [{"role": "user", "content": "x" * 2048}]}
        status, answer = await client.post(f"/sessions/{client.session_id}/v1/chat/completions", big)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (413, "invalid_request_error", "too_large")
        status, answer = await client.post(f"/sessions/{client.session_id}/v1/messages", big)
        assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")


async def test_a_bug_is_told_in_the_words_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: as everything else that a client may meet."""
    async with session_site() as site:
        client = await site.taken()

        async def broken(*_: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Session, "turn", broken)
        status, answer = await client.post(
            f"/sessions/{client.session_id}/v1/messages", {"messages": [HI], "max_tokens": 5}
        )
        assert (status, answer["type"], answer["error"]["type"]) == (500, "error", "api_error")


async def test_a_session_that_nobody_uses_ends_and_its_sample_is_made_again() -> None:
    """Its agent went: after `ttl_s` the sample fails once, and waits for another; the old key is told 410."""
    async with session_site(sessions={"ttl_s": 0.3}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        lost = await site.taken()
        assert await lost.say("hi") == "yo"
        client = await site.taken()
        assert (await lost.chat(HI))[0] == 410
        assert await client.say("hi") == "yo"
        await client.end()
        [group] = (await site.stage.take())["groups"]
        assert group["samples"][0]["response_ids"] == ids("yo")
        assert site.stage.parts.tally.failed == {"session_idle": 1}


async def test_a_sample_that_no_agent_takes_goes_back_and_nothing_is_counted_against_it() -> None:
    """P18: the buffer has it, and it waits again; a pause does not count."""
    async with session_site(sessions={"ttl_s": 0.2}) as site:
        await site.stage.until(lambda: site.figures["expired"] >= 1)
        await site.taken()
        assert not site.stage.parts.tally.failed


async def test_sessions_are_bounded() -> None:
    """`sessions.max`: the others wait for room."""
    async with session_site(3, sessions={"max": 1}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        for _ in range(3):
            client = await site.taken()
            assert site.figures["open"] == 1
            await client.say("hi")
            await client.end()
        assert len((await site.stage.take(groups=3))["groups"]) == 3


async def test_a_session_has_so_many_turns() -> None:
    """`max_turns`: asking for more ends it, and what it has is judged."""
    async with session_site(agent={"max_turns": 1}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        client = await site.taken()
        await client.say("hi")
        assert (await client.chat(HI, HI))[0] == 410
        assert len((await site.stage.take())["groups"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_has_so_many_turns_whoever_asks_at_once(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """The one that waits for another's turn is refused with a status: its stream has not begun with the other's."""
    monkeypatch.setattr(session_calls, "_WARM_S", 0.02)
    async with session_site(agent={"max_turns": 1}) as site:
        client = await site.taken()
        first = site.stage.start(client.chat(HI))
        await site.engine.wait_running(1)
        second = site.stage.start(client.chat(HI, stream=stream))
        await site.until(turns_under_way=2)
        await asyncio.wait({second}, timeout=0.1)
        site.engine.release(tokens=ids("yo"))
        assert ((await first)[0], (await second)[0]) == (200, 410)
        assert len(site.engine.requests) == 1
        [group] = (await site.stage.take())["groups"]
        assert group["samples"][0]["response_ids"] == ids("yo")


async def test_an_agent_may_say_that_it_failed() -> None:
    """P2: its sample is made again, and has no reward."""
    async with session_site() as site:
        client = await site.taken()
        assert (await client.end(error="out of ideas"))[0] == 200
        await site.taken()
        assert site.stage.parts.tally.last_failure.endswith("out of ideas")


async def test_two_hundred_sessions_at_once() -> None:
    """Each has its turns, and each sample its own tokens."""
    trainer = {"train_batch_size": 200}
    async with session_site(200, trainer=trainer, pause={"deadline_s": 10.0}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))

        async def work() -> None:
            client = await site.taken()
            await client.say("hi")
            await client.say("on")
            await client.end()

        await asyncio.gather(*(work() for _ in range(200)))
        groups = (await site.stage.take(groups=200))["groups"]
        assert {len(group["samples"][0]["response_ids"]) for group in groups} == {len("yo;<u>on;<a>yo")}


async def test_without_http_a_session_task_is_refused_before_anything_is_generated() -> None:
    """P35: with the path of the agent, and what to do."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, ready=False, agent={"path": SESSION}) as made:
        with pytest.raises(ConfigError, match=r"tasks\.0\.agent: .*service\.public_url"):
            await made.service.ready()
        assert not engine.requests


async def test_who_is_stuck_in_a_session_is_told_with_where() -> None:
    """P22: a client that is silent, a turn at the gate, a turn at an engine; figures in status and metrics."""
    async with session_site(3) as site:
        made, metrics = site.stage, Metrics(site.stage.service.bus, site.stage.service.status)
        silent, at_engine, at_gate = [await site.taken() for _ in range(3)]
        calls = [made.start(at_engine.chat(HI))]
        await site.engine.wait_running(1)
        told = made.service.stuck(0)
        assert told["counts"] == {"parked": 2, "generating": 1}
        await made.pause()
        calls.append(made.start(at_gate.chat(HI)))
        told = await site.until_at("client", "gate", "gate")
        assert any("may_speak" in link for sample in told["samples"] for link in sample["awaits"])
        assert (site.figures["open"], site.figures["waiting_for_agent"]) == (3, 0)
        assert b'rollout_sessions{what="turns_under_way"} 2.0' in metrics.render()[0]
        await made.resume()
        await site.engine.wait_running(2)
        site.engine.release(tokens=ids("yo"))
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
        assert silent.session_id


async def test_an_evaluation_is_answered_by_agents_too() -> None:
    """P15: sessions of lane `eval`, which a pause of training leaves alone."""
    async with session_site(0) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        await site.stage.pause(lanes=("train",))
        asking = site.stage.start(site.stage.evaluate([{"messages": [HI]}]))
        client = await site.taken()
        assert await client.say("hi") == "yo"
        await client.end()
        [sample] = await asking
        assert sample["response"] == "yo"
