"""`/openapi.json`: the control API described, made of the route table and the models.

Invariants:

- Every route is in it, with every status it can answer and the types that its refusals can have, and nothing else is.
- Each model is there once, under its name; making it twice gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import orjson
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from rollout_svc.rpc.envelope import ErrorAnswer, FieldFault
from rollout_svc.rpc.routes import ROUTES, Route

__all__ = ["describe"]

_REF: Final = "#/components/schemas/{model}"
_NAMES: Final = re.compile(r"\{(\w+)\}")
_BODY_REFUSALS: Final = {400: ("bad_request",), 413: ("too_large",)}
_WITH_DETAIL: Final = {400: FieldFault}
_RETRY_AFTER: Final = {
    "description": "Seconds after which it may be tried again.",
    "required": True,
    "schema": {"type": "string", "pattern": r"^\d+(\.\d+)?$"},
}
_SECONDS_S: Final = 503  # the status whose refusals say when to ask again
_SPOKEN: Final = {"type": "object", "required": ["error"]}  # a refusal as the API that is spoken has it
Schemas = Mapping[Any, dict[str, Any]]
"""The reference to each model's schema, by model and mode."""


@cache
def describe(*, token: bool) -> bytes:
    """Make the document, JSON.

    Args:
        token: whether guarded calls want a bearer token.
    """
    made, definitions = _schemas(ROUTES)
    components: dict[str, Any] = {"schemas": definitions["$defs"]}
    if token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, made, token=token)
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "rollout_svc",
                "summary": "The rollout stage of an asynchronous LLM-RL loop, as a service.",
                "version": _version(),
            },
            "servers": [{"url": "/"}],
            "paths": paths,
            "components": components,
        }
    )


def _version() -> str:
    try:
        return version("rollout-svc")
    except PackageNotFoundError:  # sources that nobody installed
        return "0"


def _schemas(routes: Iterable[Route]) -> tuple[Schemas, dict[str, Any]]:
    """Make the schemas of all models together, so that what they share is there once."""
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (ErrorAnswer, "serialization"),
        (FieldFault, "serialization"),
    ]
    for route in routes:
        wanted += [(model, "validation") for model in (route.body, route.query) if model is not None]
        wanted += [(model, "serialization") for model in (route.answer,) if model is not None]
    return models_json_schema(list(dict.fromkeys(wanted)), ref_template=_REF)


def _operation(route: Route, made: Schemas, *, token: bool) -> dict[str, Any]:
    """Describe one call."""
    operation: dict[str, Any] = {
        "operationId": route.call.__name__,
        "summary": (route.call.__doc__ or "").strip(),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in _NAMES.findall(route.path)
        ],
        "responses": {str(status): answer for status, answer in sorted(_responses(route, made, token=token).items())},
    }
    if route.query is not None:
        operation["parameters"] += _query(route.query)
    if route.body is not None:
        required = any(field.is_required() for field in route.body.model_fields.values())
        content = {"application/json": {"schema": made[route.body, "validation"]}}
        operation["requestBody"] = {"required": required, "content": content}
    operation["security"] = [{"token": []}] if token and route.guarded else []
    return operation


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Describe what an address may carry: words that are not given are left out, so none can be null."""
    schema = model.model_json_schema()
    return [
        {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": field.get("description", ""),
            "schema": next(kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"),
        }
        for name, field in schema["properties"].items()
    ]


def _responses(route: Route, made: Schemas, *, token: bool) -> dict[int, dict[str, Any]]:
    """Describe every answer, by status."""
    told: dict[int, dict[str, Any]] = {}
    for status in (route.status, *route.also):
        content = {media: _bytes_of(media) for media in (route.media, route.binary) if media is not None}
        if route.answer is not None:
            content["application/json"] = {"schema": made[route.answer, "serialization"]}
        elif route.binary is None:
            content["text/plain"] = {"schema": {"type": "string"}}
        told[status] = {"description": HTTPStatus(status).phrase, "content": content}
    refusals = dict(route.refusals)
    if route.body is not None:
        refusals |= _BODY_REFUSALS
    if route.keyed or (token and route.guarded):
        refusals[401] = ("unauthorized",)
    for status, types in refusals.items():
        content = {"application/json": {"schema": _SPOKEN if route.spoken else _refusal(status, types)}}
        told[status] = {"description": f"{HTTPStatus(status).phrase}: {', '.join(types)}", "content": content}
        if status == _SECONDS_S:
            told[status]["headers"] = {"Retry-After": _RETRY_AFTER}
    return told


def _bytes_of(media: str) -> dict[str, Any]:
    """Say that an answer is bytes of a media type."""
    return {"schema": {"type": "string", "contentMediaType": media}}


def _refusal(status: int, types: Sequence[str]) -> dict[str, Any]:
    """Say what the error envelope holds here."""
    fault: dict[str, Any] = {"type": {"enum": list(types)}}
    if status in _WITH_DETAIL:
        item = {"$ref": _REF.format(model=_WITH_DETAIL[status].__name__)}
        fault["detail"] = {"type": "array", "items": item, "minItems": 1}
    return {
        "allOf": [
            {"$ref": _REF.format(model=ErrorAnswer.__name__)},
            {"properties": {"error": {"properties": fault}}},
        ]
    }
