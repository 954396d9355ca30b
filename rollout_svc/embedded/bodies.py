"""JSON in and out of the engine's routes.

Invariant: what cannot be read is refused in SGLang's words, and nothing was done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from rollout_svc.embedded.wire import malformed

if TYPE_CHECKING:
    from aiohttp.web import Request


async def read_body(request: Request) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RefusedError: 400 when the body is empty, is not JSON, or is not an object.
    """
    raw = await request.read()
    if not raw:
        raise malformed("1 validation error: body: field required")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise malformed(f"1 validation error: body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise malformed(f"1 validation error: body: must be an object, got {type(body).__name__}")
    return body


def as_json(body: dict[str, Any], status: int = 200) -> web.Response:
    """Answer with an object."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def update_answer(message: str, *, success: bool = False) -> dict[str, Any]:
    """What SGLang answers to an update of weights."""
    return {"success": success, "message": message, "num_paused_requests": 0}
