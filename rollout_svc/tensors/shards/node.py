"""A process's place in the data plane: its owner and its fetch buffer, served by a thread of their own.

Invariants:

- Beyond loopback only with a token.
- The thread has an event loop of its own: what the process does meanwhile does not hold a fetch up, but for the
  interpreter's lock.
- `close` is idempotent, and not done until the port is free, the thread has ended and every shard is released.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Thread
from typing import Any, Final, Self

from aiohttp import web

from rollout_svc.config import is_loopback
from rollout_svc.tensors.shards.buffer import FetchBuffer
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.owner import ShardOwner
from rollout_svc.tensors.shards.plane import Plane, build_plane

__all__ = ["Node"]

START_S: Final = 30.0
STOP_S: Final = 5.0
"""How long answers that are under way may take at the end, in seconds."""


class Node:
    """Serves the data plane of this process.

    Args:
        owner: whose shards are served; None: this process only consumes.
        buffer: the fetch buffer that is drained over HTTP; usually `process.fetch_buffer()`.
        host: to bind.
        port: to bind; 0: any that is free.
        token: bearer token of every call.
        advertise: address under which others reach it; None: what was bound.
        plane: with caps of its own; instead of `owner` and `buffer`.

    Raises:
        ValueError: it would be open beyond loopback, or nobody could say under which address it is reached.
        OSError: the port is taken.
    """

    def __init__(
        self,
        owner: ShardOwner | None = None,
        buffer: FetchBuffer | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        advertise: str | None = None,
        plane: Plane | None = None,
    ) -> None:
        if not token and not is_loopback(host):
            raise ValueError(f"binding {host!r}, beyond loopback, needs a token")
        if advertise is None and host in {"", "0.0.0.0", "::"}:  # noqa: S104 - it is refused here
            raise ValueError(f"what binds {host!r} has to be told the address under which it is reached: advertise")
        self.plane = plane or Plane(owner, buffer)
        self.owner = self.plane.owner
        self._bind = host, port
        self._token = token
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        started: Future[int] = Future()
        self._thread = Thread(target=self._run, args=(started,), name="shards-node", daemon=True)
        self._thread.start()
        bound = started.result(START_S)
        shown = f"[{host}]" if ":" in host else host
        self.address = (advertise or f"http://{shown}:{bound}").rstrip("/")
        if self.owner is not None:
            self.owner.address = self.address

    def __repr__(self) -> str:
        return f"<Node {self.address} {self.owner!r}>"

    def put(self, tensor: Any) -> tuple[Shard, Meta]:
        """Keep a tensor with the owner here. Errors as `ShardOwner.put`."""
        if self.owner is None:
            raise ValueError(f"{self!r} has no owner: it only consumes")
        return self.owner.put(tensor)

    def drop(self, ids: list[str]) -> None:
        """Let go of shards here."""
        self.plane.drop(ids)

    def _run(self, started: Future[int]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits; afterwards there is nobody
            if not started.done():
                started.set_exception(error)

    async def _serve(self, started: Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(build_plane(self.plane, self._token), access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, *self._bind)
            await site.start()
            started.set_result(int(runner.addresses[0][1]))
            await self._stop.wait()
        finally:
            await runner.cleanup()

    def close(self) -> None:
        """Stop serving, and release every shard."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(START_S)
        if self.owner is not None:
            self.owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
