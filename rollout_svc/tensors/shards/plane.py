"""The data plane: what a process that has shards, or has fetched some, answers over HTTP.

| call | does |
|---|---|
| `POST fetch {"ids"}` | sends shards of the owner, each with its own status (`framing`) |
| `POST renew {"ids"}` | begins their leases anew: `{"entries"}` |
| `POST drop {"ids"}` | the owner lets go of them, and the fetch buffer of the same process drains them |
| `POST drain {"ids"}` | the fetch buffer drains them: `{"entries", "bytes"}` |
| `POST flush` | the fetch buffer lets go of everything |
| `GET stats` | `{"process", "incarnation", "owner", "buffer"}` |

Invariants:

- No pickle, in either direction.
- With a token every call wants it, and the comparison takes the same time for any token.
- A request is as long as `max_request_bytes` at the most, and an answer carries `max_response_bytes` of tensors; a
  peer that takes nothing, or sends nothing, for `stall_s` is cut off.
- Leases end when they end, also where nobody asks for anything.
- Long lists of ids are handled off the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import orjson
from aiohttp import web

from rollout_svc.tasks import TaskOwner
from rollout_svc.tensors.shards.buffer import FetchBuffer
from rollout_svc.tensors.shards.framing import frame
from rollout_svc.tensors.shards.owner import ShardOwner
from rollout_svc.tensors.shards.sending import Sender

__all__ = ["Plane", "build_plane"]

MAX_REQUEST_BYTES: Final = 32 * 2**20
"""Some 700,000 ids."""
MAX_RESPONSE_BYTES: Final = 2**30
STALL_S: Final = 60.0
SWEEP_S: Final = 30.0
"""How often leases are looked at, at the least, in seconds."""
SWEEP_END_S: Final = 1.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Plane:
    """What the calls act on.

    Args:
        owner: whose shards are fetched and dropped; None where there is none.
        buffer: the fetch buffer of this process; None where there is none.
        max_request_bytes: of a body.
        max_response_bytes: of the tensors in one answer.
        stall_s: how long a reader may take nothing of its answer, or send nothing of its request, in seconds.

    Attributes:
        incarnation: drawn at random: what comes back at the same address has another one, and nothing in its buffer.
    """

    def __init__(
        self,
        owner: ShardOwner | None = None,
        buffer: FetchBuffer | None = None,
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self.owner = owner
        self.buffer = buffer
        self.max_request_bytes = max_request_bytes
        self.max_response_bytes = max_response_bytes
        self.stall_s = stall_s
        self.incarnation = secrets.token_hex(8)

    def drop(self, ids: list[str]) -> dict[str, int]:
        """Have the owner let go of shards, and the fetch buffer as well; idempotent."""
        self.drain(ids)
        return {"entries": 0, "bytes": 0} if self.owner is None else self.owner.drop(ids)._asdict()

    def drain(self, ids: list[str]) -> dict[str, int]:
        """Have the fetch buffer drain shards; idempotent."""
        return {"entries": 0, "bytes": 0} if self.buffer is None else self.buffer.drain(ids)._asdict()

    def flush(self) -> dict[str, int]:
        """Have the fetch buffer let go of everything."""
        return {"entries": 0, "bytes": 0} if self.buffer is None else self.buffer.flush_all()._asdict()

    def renew(self, ids: list[str]) -> dict[str, int]:
        """Begin leases anew."""
        return {"entries": 0 if self.owner is None else self.owner.renew(ids)}

    def stats(self) -> dict[str, Any]:
        """Return the figures of this process."""
        return {
            "process": os.getpid(),
            "incarnation": self.incarnation,
            "owner": None if self.owner is None else self.owner.stats()._asdict(),
            "buffer": None if self.buffer is None else self.buffer.stats()._asdict(),
        }


def build_plane(plane: Plane, token: str | None = None) -> web.Application:
    """Make the application: to be run alone, or mounted under a prefix of another (`add_subapp`).

    Args:
        plane: what it acts on.
        token: every call has to bring it; None where whatever it is mounted in asks for one.
    """
    calls = _Calls(plane)
    app = web.Application(middlewares=[_guard(token)] if token else [], client_max_size=plane.max_request_bytes)
    app.cleanup_ctx.append(calls.living)
    app.add_routes(
        [
            web.post("/fetch", calls.fetch),
            web.post("/renew", calls.on_ids(plane.renew)),
            web.post("/drop", calls.on_ids(plane.drop)),
            web.post("/drain", calls.on_ids(plane.drain)),
            web.post("/flush", calls.flush),
            web.get("/stats", calls.stats),
        ]
    )
    return app


def _guard(token: str) -> Any:
    expected = token.encode()

    @web.middleware
    async def authorise(request: web.Request, handler: _Handler) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # headers are any bytes; those that are no UTF-8 arrive as surrogates
        known = hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected)
        if not (known and scheme.lower() == "bearer"):
            return _failure(401, "unauthorized", "this call needs the bearer token of the data plane")
        return await handler(request)

    return authorise


class _Calls:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._sender = Sender(plane.stall_s)

    async def living(self, _: web.Application) -> AsyncIterator[None]:
        """Look at the leases for as long as the application runs."""
        tasks = TaskOwner()
        if self._plane.owner is not None:
            tasks.spawn("shards:sweep", _sweep(self._plane.owner))
        yield
        await tasks.close(asyncio.get_running_loop().time() + SWEEP_END_S)
        self._sender.close()

    async def fetch(self, request: web.Request) -> web.StreamResponse:
        ids = await _ids(request, self._plane)
        if isinstance(ids, web.Response):
            return ids
        if self._plane.owner is None:
            return _failure(404, "not_found", "there is no owner of shards in this process")
        framed = await asyncio.to_thread(frame, self._plane.owner, ids, self._plane.max_response_bytes)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = framed.nbytes
        await response.prepare(request)
        try:
            await response.write(framed.head)
            await self._sender.send(request, response, framed.data)
            async with asyncio.timeout(self._plane.stall_s):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the reader has gone: whatever it got is of no use to anybody
        return response

    def on_ids(self, act: Callable[[list[str]], dict[str, int]]) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            ids = await _ids(request, self._plane)
            return ids if isinstance(ids, web.Response) else _json(await asyncio.to_thread(act, ids))

        return handle

    async def flush(self, _: web.Request) -> web.StreamResponse:
        return _json(await asyncio.to_thread(self._plane.flush))

    async def stats(self, _: web.Request) -> web.StreamResponse:
        return _json(await asyncio.to_thread(self._plane.stats))


async def _sweep(owner: ShardOwner) -> None:
    while True:
        await asyncio.sleep(min(SWEEP_S, owner.lease_s / 4))
        await asyncio.to_thread(owner.expire)


async def _ids(request: web.Request, plane: Plane) -> list[str] | web.Response:
    body = bytearray()
    try:
        while True:  # a piece at a time: what this is mounted in may allow more, and what comes slowly may never end
            async with asyncio.timeout(plane.stall_s):
                piece = await request.content.readany()
            if not piece:
                break
            body += piece
            if len(body) > plane.max_request_bytes:
                return _failure(413, "too_large", f"a request is {plane.max_request_bytes} bytes long at the most")
    except TimeoutError:
        return _failure(408, "timeout", f"nothing of the request came for {plane.stall_s:g} s")
    try:
        ids = (await asyncio.to_thread(orjson.loads, body))["ids"]
    except (ValueError, TypeError, KeyError):
        ids = None
    if not isinstance(ids, list) or not all(isinstance(shard_id, str) for shard_id in ids):
        return _failure(400, "bad_request", 'the body is to be {"ids": ["…", …]}')
    return ids


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _failure(status: int, type: str, message: str) -> web.Response:  # noqa: A002 - errors have a type
    return _json({"error": {"type": type, "message": message, "detail": None}}, status)
