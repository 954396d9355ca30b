"""The one shape of a refusal: `{"error": {"type", "message", "detail"}}`, whoever refuses.

Invariants:

- A ServiceError leaves with its own status, type and detail; what the HTTP server itself refuses leaves in the same
  shape; a bug is a 500, with its traceback in the log and not in the answer.
- An answer is JSON to the letter: orjson writes no NaN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from rollout_svc.errors import NotNow, ServiceError

__all__ = ["ErrorAnswer", "Fault", "FieldFault", "envelope", "errors", "json_answer", "of_http"]

_TYPES: Final = {400: "bad_request", 401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_KEPT_HEADERS: Final = frozenset({"Allow"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = structlog.get_logger("rpc")


class FieldFault(BaseModel):
    """What is wrong with one field of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str
    """Dotted path of the field; empty: the body as a whole."""
    message: str
    """What is wrong, in one line."""


class Fault(BaseModel):
    """Why a call was refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """One word, for programs."""
    message: str
    """For people, in one line."""
    detail: Any
    """What a program may need to go on; null where there is nothing."""


class ErrorAnswer(BaseModel):
    """The body of every refusal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: Fault


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Make an answer of something JSON has."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def envelope(kind: str, message: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    """Make a refusal that has nothing to add."""
    return json_answer({"error": {"type": kind, "message": message, "detail": None}}, status, headers)


def of_http(error: web.HTTPException) -> web.Response:
    """Put what the HTTP server refuses into our shape."""
    kept = {name: value for name, value in error.headers.items() if name in _KEPT_HEADERS}
    return envelope(_TYPES.get(error.status, "http_error"), error.reason, error.status, kept)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in the one shape, whatever was raised."""
    try:
        return await handler(request)
    except ServiceError as error:
        headers = {"Retry-After": f"{error.retry_after_s:g}"} if isinstance(error, NotNow) else None
        return json_answer(error.as_json(), error.status, headers)
    except web.HTTPException as error:
        return of_http(error)
    except Exception:  # noqa: BLE001 - the outermost boundary: logged with its traceback, answered as a 500
        _log.exception("rpc.bug", path=request.path)
        return envelope("internal", "a bug: its traceback is in the service's log", 500)
