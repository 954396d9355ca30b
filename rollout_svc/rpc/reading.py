"""Reading what a caller sent: bodies and addresses, as the models say.

Invariant: what a model refuses is a BadRequest that lists every problem with the path of its field.
"""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from rollout_svc.configfile import problems_of
from rollout_svc.errors import BadRequest, ConfigError, Problem

__all__ = ["checked", "read_body", "read_query", "wants"]

M = TypeVar("M", bound=BaseModel)


async def read_body(request: web.Request, model: type[M]) -> M:
    """Read and check a body; an empty one is `{}`."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:  # its encoding, or its framing
        raise BadRequest(f"the body cannot be read: {error}", detail=[{"path": "", "message": str(error)}]) from error
    try:
        data = orjson.loads(raw) if raw else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", detail=[{"path": "", "message": str(error)}]) from error
    return checked(data, model)


def read_query(request: web.Request, model: type[M]) -> M:
    """Check what an address carries; nothing may be given twice."""
    twice = sorted({key for key in request.query if len(request.query.getall(key)) > 1})
    if twice:
        raise BadRequest.of(Problem(key, "given twice") for key in twice)
    return checked(dict(request.query), model)


def wants(request: web.Request, media: str) -> bool:
    """Whether a caller asks for a media type by name (RFC 9110, 12.5.1), and not rather for JSON."""
    quality = {"application/json": 0.0, media: 0.0}
    for header in request.headers.getall("Accept", []):
        for part in header.split(","):
            name, *parameters = (word.strip().lower() for word in part.split(";"))
            if name in quality:
                quality[name] = max(quality[name], _quality(parameters))
    return quality[media] > 0 and quality[media] >= quality["application/json"]


def _quality(parameters: list[str]) -> float:
    """The `q` of a part of an Accept header; 1 where there is none, 0 where it is no number."""
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def checked(data: Any, model: type[M]) -> M:
    """Check what a caller gave."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadRequest.of(problems_of(error)) from error
    except ConfigError as error:
        raise BadRequest.of(error.problems) from error
