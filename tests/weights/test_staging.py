"""A publisher that answers what it should not: the update fails as one, and the engines have what they had."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollout_svc.errors import NotNow
from tests.embedded.helpers import served
from tests.support.stage import stage
from tests.weights.test_publish import same, weights

BEGUN: dict[str, Any] = {"manifest": None, "check_finite": False, "openings": {}}


@asynccontextmanager
async def saying(
    answers: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[str, list[str]]]:
    """A publisher that says so; yields its address and the paths it was asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        await request.read()
        said = answers.get(request.path, {})
        if isinstance(said, bytes):
            return web.Response(body=said, status=status, headers=headers)
        return web.json_response(said, status=status, headers=headers)

    app = web.Application()
    app.add_routes([web.post("/{any}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "answers",
    [
        {"/begin": b"<html>"},
        {"/begin": b"[]"},
        {"/begin": {**BEGUN, "openings": [1]}},
        {"/begin": {**BEGUN, "openings": {"w0": 1}}},
        {"/begin": {**BEGUN, "manifest": "all of them"}},
        {"/begin": {**BEGUN, "manifest": [1]}},
        {"/begin": {**BEGUN, "manifest": [{"name": ["a"], "shape": [1], "dtype": "float32"}]}},
        {"/begin": {**BEGUN, "manifest": [{"name": name, "shape": [1], "dtype": "float32"} for name in (1, "a")]}},
        {"/begin": BEGUN, "/next": b"{"},
        {"/begin": BEGUN, "/next": {"bodies": 1}},
        {"/begin": BEGUN, "/next": {"bodies": {}}},
        {"/begin": BEGUN, "/next": {}},
        {"/begin": BEGUN, "/next": {"bodies": {"other": {}}}},
        {"/begin": BEGUN, "/next": {"bodies": None, "flatten_s": "long"}},
        {"/begin": BEGUN, "/next": {"bodies": None, "flatten_s": None}},
        {"/begin": BEGUN, "/next": {"bodies": None, "flatten_s": -1}},
        {"/begin": BEGUN, "/next": {"bodies": None, "flatten_s": 0.0, "bytes": 0}},
        {"/begin": BEGUN, "/next": {"bodies": {"w0": {}}, "flatten_s": 0.0, "bytes": "many"}},
        {"/begin": BEGUN, "/next": {"bodies": {"w0": {"metadata": [{}]}}, "flatten_s": 0.0, "bytes": 1}},
        {"/begin": BEGUN, "/next": {"bodies": {"w0": {"update": "another"}}, "flatten_s": 0.0, "bytes": 1}},
    ],
)
async def test_what_means_nothing_ends_the_update(answers: Mapping[str, Any]) -> None:
    """P24 P35: one clear failure, the publisher told that it is over, and another update can be made."""
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        had = weights(engine)
        async with saying(answers) as (url, asked):
            for _ in range(2):
                with pytest.raises(NotNow) as raised:
                    await made.service.update_weights(1, {"kind": "shm", "publisher": url, "token": "t"}, pause={})
                assert raised.value.type == "update_failed"
                assert "http_500" not in str(raised.value.detail), "refused, and not run into"
                assert asked.pop() == "/end"
        assert same(weights(engine), had)
        assert not engine.engine._updating.open


async def test_a_publisher_that_sends_elsewhere_is_not_followed() -> None:
    """P35: its token goes to nobody else."""
    async with saying({}) as (elsewhere, asked), served(is_open=True) as engine:
        moved = {"Location": f"{elsewhere}/begin"}
        async with (
            saying({}, status=307, headers=moved) as (url, _),
            stage(str(engine.session._base_url)) as made,
        ):
            with pytest.raises(NotNow):
                await made.service.update_weights(1, {"kind": "shm", "publisher": url, "token": "t"}, pause={})
        assert asked == []
