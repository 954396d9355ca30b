"""The HTTP control API: routes, bodies in, records out.

Invariants:

- Every error leaves as `{"error": {"type", "message", "detail"}}` with the status of its class; a bug is a 500 of the
  same shape, with its traceback in the log and not in the answer.
- With a token, every route but `/healthz` and `/readyz` wants it; the comparison takes the same time for any token.
- A caller that goes away ends its own wait and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import orjson
import structlog
from aiohttp import web
from pydantic import BaseModel, ValidationError

from rollout_svc.configfile import problems_of
from rollout_svc.errors import BadRequest, ConfigError, NotNow, Problem, ServiceError
from rollout_svc.rpc import bodies
from rollout_svc.service import RolloutService

__all__ = ["MAX_BODY_BYTES", "SERVICE", "build_app"]

MAX_BODY_BYTES: Final = 64 * 2**20  # of a request: prompts are pushed in lists
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_ERROR_TYPES: Final = {401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}

SERVICE: Final = web.AppKey("service", RolloutService)
TOKEN: Final = web.AppKey("token", str)
METRICS: Final = web.AppKey("metrics", object)
B = TypeVar("B", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = structlog.get_logger("rpc")


def build_app(service: RolloutService, metrics: Callable[[], tuple[bytes, str]] | None = None) -> web.Application:
    """Make the application for a service.

    Args:
        service: the service, started or about to be.
        metrics: gives the body and content type of `/metrics`.
    """
    app = web.Application(middlewares=[_errors, _authorise], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app[TOKEN] = service.config.service.token or ""
    app[METRICS] = metrics
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
            web.get("/v1/status", _status),
            web.get("/v1/stuck", _stuck),
            web.post("/v1/pause", _pause),
            web.post("/v1/resume", _resume),
            web.post("/v1/batches", _take_batch),
            web.post("/v1/batches/{id}/ack", _ack),
            web.post("/v1/prompts", _prompts),
            web.post("/v1/weights", _weights),
            web.get("/v1/concurrency", _get_concurrency),
            web.put("/v1/concurrency", _put_concurrency),
            web.get("/v1/workers", _get_workers),
            web.post("/v1/workers", _add_worker),
            web.delete("/v1/workers/{id}", _remove_worker),
        ]
    )
    return app


# -- what surrounds every call -------------------------------------------------------------------------------


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as error:
        headers = {"Retry-After": f"{error.retry_after_s:g}"} if isinstance(error, NotNow) else None
        return _json(error.as_json(), error.status, headers)
    except web.HTTPException as error:
        kind = _ERROR_TYPES.get(error.status, "http_error")
        return _json(_error(kind, error.reason), error.status, {k: v for k, v in error.headers.items() if k == "Allow"})
    except Exception:  # noqa: BLE001 - the outermost boundary: logged with its traceback, answered as a 500
        _log.exception("rpc.bug", path=request.path)
        return _json(_error("internal", "a bug: its traceback is in the service's log"), 500)


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[TOKEN]
    if token and request.path not in _OPEN_PATHS:
        given = request.headers.get("Authorization", "")
        # Headers are any bytes; those that are no UTF-8 arrive as surrogates, and must not be an error of ours.
        scheme, _, key = given.partition(" ")
        known = hmac.compare_digest(key.encode("utf-8", "surrogateescape"), token.encode())
        if not (known and scheme.lower() == "bearer"):
            return _json(_error("unauthorized", "this call needs the service's bearer token"), 401)
    return await handler(request)


async def _body(request: web.Request, model: type[B]) -> B:
    """Read and check a body; an empty one is `{}`."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:  # its encoding, or its framing
        raise BadRequest(f"the body cannot be read: {error}", detail=[{"path": "", "message": str(error)}]) from error
    try:
        data = orjson.loads(raw) if raw else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", detail=[{"path": "", "message": str(error)}]) from error
    return _checked(data, model)


def _query(request: web.Request, model: type[B]) -> B:
    """Check what an address carries; nothing may be given twice."""
    twice = sorted({key for key in request.query if len(request.query.getall(key)) > 1})
    if twice:
        raise _refuse(tuple(Problem(key, "given twice") for key in twice))
    return _checked(dict(request.query), model)


def _checked(data: Any, model: type[B]) -> B:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refuse(problems_of(error)) from error
    except ConfigError as error:
        raise _refuse(error.problems) from error


def _refuse(problems: tuple[Problem, ...]) -> BadRequest:
    message = "; ".join(str(problem) for problem in problems)
    return BadRequest(message, detail=[{"path": problem.path, "message": problem.message} for problem in problems])


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "detail": None}}


# -- the calls -----------------------------------------------------------------------------------------------


async def _healthz(request: web.Request) -> web.Response:
    state = request.app[SERVICE].state
    return _json({"state": state}, 500 if state == "failed" else 200)


async def _readyz(request: web.Request) -> web.Response:
    state = request.app[SERVICE].state
    return _json({"state": state}, 503 if state in ("starting", "stopping", "failed") else 200)


async def _metrics(request: web.Request) -> web.Response:
    render = request.app[METRICS]
    if not callable(render):
        raise web.HTTPNotFound
    body, content_type = render()
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _status(request: web.Request) -> web.Response:
    return _json(request.app[SERVICE].status())


async def _stuck(request: web.Request) -> web.Response:
    return _json(request.app[SERVICE].stuck(_query(request, bodies.Stuck).older_than_s))


async def _pause(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Pause)
    return _json((await request.app[SERVICE].pause(**_pause_arguments(body))).as_json())


def _pause_arguments(body: bodies.Pause) -> dict[str, Any]:
    if body.offload:
        raise _refuse((Problem("offload", "not supported by this version"),))
    return body.model_dump(exclude={"offload"})


async def _resume(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Resume)
    return _json(await request.app[SERVICE].resume(ticket=body.ticket, weight_version=body.weight_version))


async def _take_batch(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Batch)
    batch = await request.app[SERVICE].lease_batch(body.step, body.groups, body.timeout_s, body.ack)
    parts: list[bytes] = []
    for part in batch.encoded():
        parts.append(part)
        await asyncio.sleep(0)  # a large batch must not hold the loop
    return web.Response(body=b"".join(parts), content_type="application/json")


async def _ack(request: web.Request) -> web.Response:
    await _body(request, bodies.Ack)
    return _json(await request.app[SERVICE].ack(request.match_info["id"]))


async def _prompts(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Prompts)
    return _json(await request.app[SERVICE].put_prompts(body.task, body.prompts))


async def _weights(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Weights)
    pause = None if body.pause is None else _pause_arguments(body.pause)
    source = body.source.model_dump(exclude_none=True)
    return _json(await request.app[SERVICE].update_weights(body.version, source, pause))


async def _get_concurrency(request: web.Request) -> web.Response:
    return _json(request.app[SERVICE].concurrency())


async def _put_concurrency(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Concurrency)
    return _json(await request.app[SERVICE].set_concurrency(body.trainer, body.limits))


async def _get_workers(request: web.Request) -> web.Response:
    return _json({"workers": request.app[SERVICE].workers()})


async def _add_worker(request: web.Request) -> web.Response:
    body = await _body(request, bodies.Worker)
    if body.launch is not None and not request.app[TOKEN]:
        # Whoever reaches the port could have us run anything, a page in a browser on this machine included.
        raise _refuse((Problem("launch", "starting a process over HTTP needs a service with a service.token"),))
    return _json(await request.app[SERVICE].add_worker(body), 201)


async def _remove_worker(request: web.Request) -> web.Response:
    return _json(await request.app[SERVICE].remove_worker(request.match_info["id"]), 202)
