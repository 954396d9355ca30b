"""The routes of sessions: whatever is sent to a live one, the answer is a described one."""

from __future__ import annotations

from typing import Any

import pytest

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
