"""What each call of a session does: turns in the shapes of the APIs that agents speak, a reward, the end.

Invariants:

- A session's own key opens it, as a bearer token or as `x-api-key`, and so does the service's token.
- A turn that its client does not wait for is cancelled, and so is its engine call.
- A refusal leaves in the shape of the API that was spoken. A stream begins when the engine works on the turn: until
  then it may yet be refused with a status.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import orjson
import structlog
from aiohttp import web

from rollout_svc.errors import BadRequest, Conflict, NotFound, NotNow, SampleFailure, ServiceError, Unauthorized
from rollout_svc.rpc import bodies
from rollout_svc.rpc.calls import Site, one_service
from rollout_svc.rpc.envelope import json_answer
from rollout_svc.rpc.reading import read_body
from rollout_svc.sessions import anthropic, openai
from rollout_svc.sessions.exchange import Answer, Asked
from rollout_svc.sessions.refusals import headers
from rollout_svc.sessions.registry import Sessions
from rollout_svc.sessions.resent import Reader
from rollout_svc.sessions.session import Session

__all__ = ["chat_completions", "end_session", "find_session", "messages", "models", "open_session", "report_reward"]

_WARM_S: Final = 5.0  # seconds between two comments in a stream whose answer is not there yet; proxies wait for 60


_log = structlog.get_logger("rpc")
_MODEL: Final = "policy"  # a client may name any


class _TooLarge(ServiceError):
    """Raised when a body is beyond the bound of bodies."""

    status = 413
    default_type = "too_large"


class _Shape(NamedTuple):
    """How an API reads and writes things."""

    reader: Reader
    write: Callable[[Answer, Asked], dict[str, Any]]
    stream: Callable[[Answer, Asked], Iterator[bytes]]
    error: Callable[[BaseException], tuple[int, dict[str, Any]]]
    models: Callable[[str], dict[str, Any]]


def _shape_of(api: ModuleType) -> _Shape:
    return _Shape(api, api.write_answer, api.stream_answer, api.write_error, api.write_models)


_OPENAI: Final = _shape_of(openai)
_ANTHROPIC: Final = _shape_of(anthropic)


async def open_session(site: Site, body: bodies.OpenSession) -> dict[str, Any]:
    """Take the session of the next sample that waits for an agent that lives elsewhere."""
    service = one_service(site)
    state = service.state
    if state in ("starting", "stopping", "failed"):
        raise NotNow(state, f"the service is {state}")
    runtime = service.prepared.runtimes.get(body.task)
    if runtime is None:
        raise NotFound("no such task", detail={"tasks": sorted(service.prepared.runtimes)})
    if not getattr(runtime.agent, "takes_outsiders", False):
        raise Conflict(f"task {body.task!r} has an agent of its own: its samples wait for nobody")
    sessions = service.parts.sessions
    return sessions.describe(await sessions.claim(body.task, body.wait_s))


async def chat_completions(site: Site, request: web.Request, session_id: str) -> web.StreamResponse:
    """A turn, as OpenAI's chat completions."""
    return await _answered(site, request, session_id, _OPENAI)


async def messages(site: Site, request: web.Request, session_id: str) -> web.StreamResponse:
    """A turn, as Anthropic's messages."""
    return await _answered(site, request, session_id, _ANTHROPIC)


async def models(site: Site, request: web.Request, session_id: str) -> web.StreamResponse:
    """The model of a session, as the API lists it whose client asks."""
    shape = _ANTHROPIC if "anthropic-version" in request.headers else _OPENAI
    try:
        find_session(site, request, session_id)
    except ServiceError as error:
        return _refused(error, shape)
    return json_answer(shape.models(_MODEL))


async def report_reward(site: Site, request: web.Request, session_id: str) -> web.StreamResponse:
    """Note the reward of a session's sample, for its judger; the last one holds."""
    session = find_session(site, request, session_id)
    body = await read_body(request, bodies.ReportReward)
    find_session(site, request, session_id).report(body.reward)  # it may have ended meanwhile
    return json_answer({"session_id": session.session_id, "reward": body.reward})


async def end_session(site: Site, request: web.Request, session_id: str) -> web.StreamResponse:
    """End a session: its sample goes to its judger, or fails where an error is told."""
    find_session(site, request, session_id)
    body = await read_body(request, bodies.EndSession)
    session = find_session(site, request, session_id)
    session.end(None if body.error is None else SampleFailure("agent_error", body.error))
    return json_answer({"session_id": session.session_id, "turns": session.turns})


def find_session(site: Site, request: web.Request, session_id: str) -> Session:
    """Find the open session that a request's own key, or the service's token, opens.

    Raises:
        ServiceError: there is none, it is over, or the key is another's.
    """
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    token = site.service.config.service.token
    trusted = token is not None and hmac.compare_digest(key.encode("utf-8", "surrogateescape"), token.encode())
    try:
        return one_service(site).parts.sessions.find(session_id, None if trusted else key)
    except NotFound as error:
        if trusted or token is None:
            raise
        raise Unauthorized("this call needs a session's own key, or the service's bearer token") from error


async def _answered(site: Site, request: web.Request, session_id: str, shape: _Shape) -> web.StreamResponse:
    """Answer a request for a turn, whatever comes of it."""
    try:
        known = find_session(site, request, session_id)
        asked = await _read(request, known, shape)
        session, sessions = find_session(site, request, session_id), one_service(site).parts.sessions
        return await _turn(request, sessions, session, asked, shape)
    except (ServiceError, SampleFailure) as error:
        return _refused(error, shape)


async def _read(request: web.Request, session: Session, shape: _Shape) -> Asked:
    try:
        return session.read(await request.read(), shape.reader)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _TooLarge(error.reason) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error


async def _turn(
    request: web.Request, sessions: Sessions, session: Session, asked: Asked, shape: _Shape
) -> web.StreamResponse:
    turn = sessions.begin(session, asked)
    response: web.StreamResponse | None = None
    try:
        while not turn.done():
            await asyncio.wait({turn}, timeout=_WARM_S if asked.stream else None)
            if session.speaking is turn:
                response = response or await _begin_stream(request)
                await response.write(b": the model is at it\n\n")
    finally:
        if not turn.done():
            await sessions.leave(turn)
    try:
        answer = sessions.outcome(turn)
    except Exception as error:  # noqa: BLE001 - a bug is told in the API's own shape, too
        if not isinstance(error, ServiceError | SampleFailure):
            _log.exception("rpc.bug", path=request.path)
        if response is None:
            return _refused(error, shape)
        await response.write(b"event: error\ndata: " + orjson.dumps(shape.error(error)[1]) + b"\n\n")
        return response
    if not asked.stream:
        return json_answer(shape.write(answer, asked))
    response = response or await _begin_stream(request)
    for event in shape.stream(answer, asked):
        await response.write(event)
    return response


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def _refused(error: Exception, shape: _Shape) -> web.Response:
    status, body = shape.error(error)
    return json_answer(body, status, headers(error))
