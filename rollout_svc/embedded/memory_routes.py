"""Memory given up and taken back over HTTP, named as in SGLang 0.5.23.

| route | body | does |
|---|---|---|
| `POST /release_memory_occupation` | `{tags?}` | gives up `weights`, `kv_cache`, or both |
| `POST /resume_memory_occupation` | `{tags?}` | takes them back |

Invariants:
- SGLang dies of being asked while it is busy, and of a tag that is not given up; this engine refuses, with a 400.
- While anything is given up requests wait in the queue, where an abort ends them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from rollout_svc.embedded.bodies import read_body
from rollout_svc.embedded.memory import TAGS, MemoryRefusedError, Tag
from rollout_svc.embedded.wire import invalid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout_svc.embedded.engine import Engine


def memory_routes(engine: Engine) -> list[web.RouteDef]:
    """Make the routes of an engine."""
    return [
        web.post("/release_memory_occupation", _answering(engine.release_memory)),
        web.post("/resume_memory_occupation", _answering(engine.resume_memory)),
    ]


def _answering(
    move: Callable[[frozenset[Tag]], Awaitable[None]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        given = (await read_body(request)).get("tags")
        wanted = list(TAGS) if given is None else given
        if not isinstance(wanted, list) or not wanted or not all(tag in TAGS for tag in wanted):
            raise invalid(f"tags must be some of {', '.join(TAGS)}, got {wanted!r:.100}")
        try:
            await move(frozenset(tag for tag in TAGS if tag in wanted))
        except MemoryRefusedError as error:
            raise invalid(str(error)) from error
        return web.Response(body=b"null", content_type="application/json")

    return answer
