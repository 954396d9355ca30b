"""`/openapi.json`: what it describes is what is there, and the judge that says so bites."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.producer.lines import check_line
from rollout_svc.rpc.app import build_app
from rollout_svc.rpc.routes import ROUTES
from rollout_svc.service import RolloutService
from tests.rpc.api import TOKEN, Caller, api
from tests.support.described import Described
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import make_config

WHOLE = Described.of_service()


@pytest.fixture
async def call() -> AsyncIterator[Caller]:
    """Yield an API over one engine that answers at once."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with api(engine) as caller:
            yield caller


async def test_every_route_is_described_and_nothing_else() -> None:
    """The routes of the application, the table and the document name the same calls."""
    app = build_app(RolloutService(make_config()))
    served = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method.upper(), path) for path, calls in WHOLE.document["paths"].items() for method in calls}
    assert served == described == {(route.method, route.path) for route in ROUTES}


async def test_the_document_is_served(call: Caller) -> None:
    """It comes as JSON, its schemas are schemas, and every reference in it leads somewhere."""
    status, document = await call("GET", "/openapi.json")
    assert (status, document) == (200, WHOLE.document)
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    assert {ref.rpartition("/")[2] for ref in references(document)} <= set(schemas)


def references(value: Any) -> set[str]:
    """Collect every `$ref` below a value."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


def test_names_in_the_document_are_unique() -> None:
    """No two calls share an operation id, and every call says what it does."""
    calls = [call for path in WHOLE.document["paths"].values() for call in path.values()]
    assert len({call["operationId"] for call in calls}) == len(calls)
    assert all(call["summary"] for call in calls)


async def test_the_token_is_described_where_there_is_one() -> None:
    """With a token every call but the two open ones names the bearer scheme and its 401; without, none."""  # P34
    async with FakeSGLang(weight_version="0") as engine, api(engine, service={"port": 0, "token": TOKEN}) as call:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        document = (await call("GET", "/openapi.json", headers=headers))[1]
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    for path, calls in document["paths"].items():
        for said in calls.values():
            guarded = path not in {"/healthz", "/readyz"}
            assert said["security"] == ([{"token": []}] if guarded else []), path
            assert ("401" in said["responses"]) == guarded, path
    assert "securitySchemes" not in WHOLE.document["components"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"state": "asleep"}, "state"),
        ({"ticket": None}, "ticket"),
        ({"more": 1}, "more"),
        ({"plan": {}}, "plan"),
        ({"lanes": {"side": {}}}, "lanes"),
    ],
)
async def test_an_answer_that_is_not_described_is_found(call: Caller, change: dict[str, Any], fault: str) -> None:
    """A value, a key or a status too many, and a key too few: the judge that all tests here use says so."""
    status, answer = await call("GET", "/v1/status")
    ask = ("GET", "/v1/status")
    assert not WHOLE.faults_of_answer(*ask, status, "application/json", answer)
    assert any(fault in told for told in WHOLE.faults_of_answer(*ask, status, "application/json", answer | change))
    assert WHOLE.faults_of_answer(*ask, status, "application/json", {k: v for k, v in answer.items() if k != "state"})
    assert WHOLE.faults_of_answer(*ask, 500, "application/json", answer)
    assert WHOLE.faults_of_answer(*ask, status, "text/html", answer)


def test_a_refusal_of_another_type_is_found() -> None:
    """The types that a call can be refused with are part of its description."""
    body = {"error": {"type": "frozen", "message": "m", "detail": None}}
    assert not WHOLE.faults_of_answer("POST", "/v1/pause", 409, "application/json", body)
    assert WHOLE.faults_of_answer("POST", "/v1/resume", 409, "application/json", body)


CONTENT = st.one_of(
    st.none(),
    st.text(max_size=2),
    st.integers(-1, 3),
    st.booleans(),
    st.lists(
        st.one_of(st.integers(-1, 5), st.text(max_size=1), st.fixed_dictionaries({"role": st.text(max_size=2)})),
        max_size=2,
    ),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
)
KEYS = ("id", "messages", "text", "input_ids", "ground_truth", "meta", "engine_extra", "more")


@given(st.dictionaries(st.sampled_from(KEYS), CONTENT, max_size=4))
def test_a_prompt_line_is_described_as_it_is_read(line: dict[str, Any]) -> None:
    """The reader of prompt lines and their description take and refuse the same."""
    described = not WHOLE.faults_of_body("POST", "/v1/prompts", {"task": "t", "prompts": [line]})
    assert described == (check_line(line, {}) is None)


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"NONSENSE\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "bad_request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400, "bad_request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400, "bad_request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nExpect: more\r\nConnection: close\r\n\r\n", 417, "http_error"),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, "not_found"),
        (b"PATCH /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405, "method_not_allowed"),
    ],
)
async def test_the_http_server_refuses_in_the_same_shape(call: Caller, sent: bytes, status: int, kind: str) -> None:
    """What never becomes a call, or none of ours, is answered with the one shape of errors too."""  # P35
    host, port = call.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert int(head.split()[1]) == status, head
    assert b"application/json" in head
    error = error_of(body)
    assert (error["type"], error["detail"]) == (kind, None)
    assert error["message"]
    assert (await call("GET", "/healthz"))[0] == 200


def error_of(body: bytes) -> dict[str, Any]:
    """Read an error body, whose shape is checked."""
    answer = orjson.loads(body)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"type", "message", "detail"}
    error: dict[str, Any] = answer["error"]
    return error
