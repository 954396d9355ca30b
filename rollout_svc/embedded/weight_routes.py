"""Weights in buckets over HTTP: begun, sent, ended or abandoned.

| route | body | does |
|---|---|---|
| `POST /begin_weight_update` | `{manifest?, check_finite?, update?}` | opens an update; an open one is forgotten |
| `POST /update_weights_from_shared_memory` | a call, see `receiving.py`, and `update?` | stages a bucket |
| `POST /init_weights_update_group` | a call, see `groups.py` | joins a trainer's group |
| `POST /update_weights_from_distributed` | `{names, dtypes, shapes, group_name, load_format, …}` | stages a bucket |
| `POST /destroy_weights_update_group` | `{group_name}` | leaves the group |
| `POST /end_weight_update` | `{weight_version?, update?}` | swaps it in, and labels it |
| `POST /abandon_weight_update` | `{update?}` | forgets it |
| `POST /revert_weight_update` | `{weight_version?, update?}` | takes it back: swaps the weights before it in |

`update` is a name that the sender gives an update: another's calls are refused. What is broadcast has none.

All but the second and the last two are named as in SGLang 0.5.23, where an update from tensors has to stand between
them.

Invariants:
- Until `/end_weight_update` answers 200 the weights and their label are as they were.
- A refusal is 400 with `success: false` and a message; the kind `event` says that the buffer's event cannot be opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from rollout_svc.embedded.bodies import as_json, read_body, update_answer
from rollout_svc.embedded.model import WeightsError
from rollout_svc.embedded.receiving import BucketError, EventError
from rollout_svc.embedded.wire import RefusedError, need_text, read_flag, read_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout_svc.embedded.engine import Engine

WEIGHT_TRANSPORTS: Final = ("disk", "shm", "distributed")
"""Ways in which weights get into this engine, as `/server_info` tells them."""


def weight_routes(engine: Engine) -> list[web.RouteDef]:
    """Make the routes of an engine."""

    async def begin(request: web.Request) -> str:
        body = await read_body(request)
        finite = read_flag(body, "check_finite", default=False)
        await engine.begin_update(body.get("manifest"), finite=finite, update=read_text(body, "update"))
        return "Weight update begun."

    async def bucket(request: web.Request) -> str:
        count = await engine.receive_bucket(await read_body(request))
        return f"{count} tensors staged."

    async def join(request: web.Request) -> str:
        await engine.join_group(await read_body(request))
        return "Succeeded to initialize custom process group."

    async def leave(request: web.Request) -> str:
        await engine.leave_group(need_text(await read_body(request), "group_name"))
        return "Succeeded to destroy custom process group."

    async def broadcast(request: web.Request) -> str:
        body = await read_body(request)
        read_flag(body, "flush_cache", default=True)  # nothing is cached between requests: either value is honoured
        count = await engine.receive_broadcast(body, read_text(body, "weight_version"))
        return f"{count} tensors staged."

    async def end(request: web.Request) -> str:
        body = await read_body(request)
        await engine.end_update(read_text(body, "weight_version"), read_text(body, "update"))
        return "Succeeded to update model weights."

    async def abandon(request: web.Request) -> str:
        await engine.abandon_update(read_text(await read_body(request), "update"))
        return "Weight update abandoned."

    async def revert(request: web.Request) -> str:
        body = await read_body(request)
        await engine.revert_update(read_text(body, "weight_version"), read_text(body, "update"))
        return "Weight update reverted."

    return [
        web.post("/begin_weight_update", _answering(begin)),
        web.post("/update_weights_from_shared_memory", _answering(bucket)),
        web.post("/init_weights_update_group", _answering(join)),
        web.post("/update_weights_from_distributed", _answering(broadcast)),
        web.post("/destroy_weights_update_group", _answering(leave)),
        web.post("/end_weight_update", _answering(end)),
        web.post("/abandon_weight_update", _answering(abandon)),
        web.post("/revert_weight_update", _answering(revert)),
    ]


def _answering(
    work: Callable[[web.Request], Awaitable[str]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer what a piece of work says, or why it was refused."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return as_json(update_answer(await work(request), success=True))
        except (WeightsError, BucketError) as error:
            body = update_answer(f"Failed to update model weights: {error}") | {"kind": _kind_of(error)}
            raise RefusedError(body) from error

    return answer


def _kind_of(error: WeightsError | BucketError) -> str:
    if isinstance(error, EventError):
        return "event"
    return "bucket" if isinstance(error, BucketError) else "weights"
