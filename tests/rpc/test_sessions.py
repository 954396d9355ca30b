"""The routes of sessions: whatever is sent to a live one, the answer is a described one."""

from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from rollout_svc.observe.metrics import Metrics
from rollout_svc.rpc import app
from tests.rpc.api import Caller
from tests.support.fake_sglang import Reply
from tests.support.session_site import ids, session_site

HI = {"role": "user", "content": "hi"}
BODIES: tuple[Any, ...] = (
    b"\xff",
    b"[",
    b"null",
    b"3",
    [],
    {},
    {"messages": []},
    {"messages": [HI], "max_tokens": 8},
    {"messages": [HI], "max_tokens": 0},
    {"messages": [HI], "max_tokens": 1.5},
    {"messages": [{"role": 3}], "max_tokens": 8},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 8},
    {"messages": [{"role": "user", "content": "\ud800".encode("utf-8", "replace").decode()}], "max_tokens": 8},
    {"messages": [HI], "tools": {}, "max_tokens": 8},
    {"messages": [HI], "stop": [""], "max_tokens": 8},
    {"messages": [HI], "stream": "yes", "max_tokens": 8},
    {"reward": "high"},
    {"reward": float("inf")},
    {"reward": None},
    {"reward": 0.5},
    {"reward": 0.5, "more": 1},
    {"error": ""},
    {"error": 3},
    {"wait_s": -1, "task": "t"},
    {"wait_s": 0, "task": "u"},
    {"wait_s": 0, "task": "t"},
)


@pytest.mark.parametrize("token", [None, "s3cret"])
async def test_whatever_is_sent_to_a_session_the_answer_is_described(token: str | None) -> None:
    """P35: no status, key or header that is not, with the session's key, the token, another key and none."""
    async with session_site(service={"port": 0, "token": token}) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        client = await site.taken()
        call = Caller(site.http, site.url, site.stage)
        heads = [client.headers, {"x-api-key": "another"}, {}, {"Authorization": f"Bearer {token}"}]
        seen = set()
        below = f"/sessions/{client.session_id}"
        for headers in heads:
            for path in (f"{below}/v1/chat/completions", f"{below}/v1/messages", f"{below}/reward", "/sessions"):
                for body in BODIES:
                    status, answer = await call("POST", path, body, headers=headers)
                    seen.add(status)
                    assert status < 400 or "error" in answer
            for path in (f"{below}/v1/models", "/sessions/nobody/v1/models"):
                seen.add((await call("GET", path, headers=headers))[0])
        assert seen == {200, 400, 401, 404, 503}
        for body in ({"error": 3}, {"more": 1}, {}):
            status, _ = await call("POST", f"{below}/end", body, headers=client.headers)
        assert status == 200
        assert (await call("POST", f"{below}/end", {}, headers=client.headers))[0] == 410
        assert (await call("GET", "/v1/status", headers=heads[3]))[0] == 200
        assert Metrics(site.stage.service.bus, site.stage.service.status).render()[0]
        assert len((await site.stage.take())["groups"]) == 1


async def test_a_large_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: 413, and the session goes on."""
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 2000)
    async with session_site() as site:
        client = await site.taken()
        call = Caller(site.http, site.url, site.stage)
        body = b'{"messages": [' + b" " * 2000 + b"]}"
        path = f"/sessions/{client.session_id}/v1/chat/completions"
        assert (await call("POST", path, body, headers=client.headers))[0] == 413
        assert (await client.end())[0] == 200


def spoken_as(api: str, answer: Any) -> tuple[str, str]:
    """The kind of a refusal and its words, which has to have the shape of that API."""
    if api == "anthropic":
        assert (set(answer), answer["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(answer["error"]) == {"type", "message"}
        return answer["error"]["type"], answer["error"]["message"]
    assert (set(answer), set(answer["error"])) == ({"error"}, {"message", "type", "param", "code"})
    return answer["error"]["code"], answer["error"]["message"]


STRAYS: tuple[tuple[str, str, dict[str, str], str, int, str], ...] = (
    ("POST", "v1/messages/count_tokens", {}, "anthropic", 404, "not_found_error"),
    ("GET", "v1/messages", {}, "anthropic", 405, "invalid_request_error"),
    ("GET", "v1/models/policy", {"anthropic-version": "2023-06-01"}, "anthropic", 404, "not_found_error"),
    ("GET", "v1/models/policy", {}, "openai", 404, "not_found"),
    ("POST", "v1/responses", {}, "openai", 404, "not_found"),
    ("GET", "v1/chat/completions", {}, "openai", 405, "method_not_allowed"),
    ("DELETE", "v1/models", {}, "openai", 405, "method_not_allowed"),
)


@pytest.mark.parametrize("token", [None, "s3cret"])
async def test_what_a_session_has_not_is_refused_as_its_api_refuses(token: str | None) -> None:
    """P34, P35: in the shape that the client reads, with `Allow`; to a key that opens nothing, no more than that."""
    async with session_site(service={"port": 0, "token": token}) as site:
        client = await site.taken()
        below = f"{site.url}/sessions/{client.session_id}/"
        for method, path, more, api, status, kind in STRAYS:
            async with site.http.request(method, below + path, headers=client.headers | more) as answer:
                told, words = spoken_as(api, await answer.json())
                assert (answer.status, told, "a session has no" in words) == (status, kind, True)
                assert ("Allow" in answer.headers) == (status == 405)
                assert answer.headers["x-should-retry"] == "false"
            async with site.http.request(method, below + path, headers={"Authorization": "Bearer x"} | more) as answer:
                spoken_as(api, await answer.json())
                assert answer.status == 401
        for odd in ("v1/%FF", "v1/%ED%A0%80", "v1/%00", "%2F"):  # as bytes in an address go
            async with site.http.get(URL(below + odd, encoded=True), headers=client.headers) as answer:
                assert answer.status == 404
        for method, path, status in (("GET", "reward", 405), ("POST", "chat/completions", 404)):
            async with site.http.request(method, below + path, headers=client.headers) as answer:
                assert (answer.status, set((await answer.json())["error"])) == (status, {"type", "message", "detail"})


async def test_a_method_that_is_not_there_is_told_without_a_session_too() -> None:
    """P35: whoever may ask of any session learns which methods there are."""
    async with session_site(service={"port": 0, "token": "s3cret"}) as site:
        path = f"{site.url}/sessions/nobody/v1/models"
        async with site.http.put(path, headers={"Authorization": "Bearer s3cret"}) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")
        async with site.http.put(path) as answer:
            assert answer.status == 401
