"""Weights in buckets over HTTP: begun, sent, ended or abandoned.

| route | body | does |
|---|---|---|
| `POST /begin_weight_update` | `{manifest?, check_finite?}` | opens an update; one that was open is forgotten |
| `POST /update_weights_from_shared_memory` | a call, see `receiving.py` | stages a bucket |
| `POST /end_weight_update` | `{weight_version?}` | swaps it in, and labels it |
| `POST /abandon_weight_update` | `{}` | forgets it |
| `POST /revert_weight_update` | `{weight_version?}` | after it was swapped in: swaps the weights before it in again |

The first and third are named as in SGLang 0.5.23, where an update from tensors has to stand between them.

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
from rollout_svc.embedded.wire import RefusedError, read_flag, read_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout_svc.embedded.engine import Engine

WEIGHT_TRANSPORTS: Final = ("disk", "shm")
"""Ways in which weights get into this engine, as `/server_info` tells them."""


def weight_routes(engine: Engine) -> list[web.RouteDef]:
    """Make the routes of an engine."""

    async def begin(request: web.Request) -> str:
        body = await read_body(request)
        finite = read_flag(body, "check_finite", default=False)
        await engine.begin_update(body.get("manifest"), finite=finite)
        return "Weight update begun."

    async def bucket(request: web.Request) -> str:
        count = await engine.receive_bucket(await read_body(request))
        return f"{count} tensors staged."

    async def end(request: web.Request) -> str:
        await engine.end_update(read_text(await read_body(request), "weight_version"))
        return "Succeeded to update model weights."

    async def abandon(request: web.Request) -> str:
        await read_body(request)
        await engine.abandon_update()
        return "Weight update abandoned."

    async def revert(request: web.Request) -> str:
        await engine.revert_update(read_text(await read_body(request), "weight_version"))
        return "Weight update reverted."

    return [
        web.post("/begin_weight_update", _answering(begin)),
        web.post("/update_weights_from_shared_memory", _answering(bucket)),
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
            kind = (
                "event" if isinstance(error, EventError) else "bucket" if isinstance(error, BucketError) else "weights"
            )
            body = update_answer(f"Failed to update model weights: {error}") | {"kind": kind}
            raise RefusedError(body) from error

    return answer


def _kind_of(error: WeightsError | BucketError) -> str:
    if isinstance(error, EventError):
        return "event"
    return "bucket" if isinstance(error, BucketError) else "weights"
