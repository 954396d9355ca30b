"""An engine process that lets all its answers go at once and says when an abort reached it.

`python -m tests.support.burst_engine`, of raw connections, so that its own work does not hide the client's. Commands,
on a connection that was opened before: `POST /shut`, `POST /burst`, `GET /marks`.

- Answers leave in slices with a look at the connections in between: an abort is marked when it arrives.
- `CLOCK_MONOTONIC` is one clock for all processes of a machine: marks compare with the client's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import socket
import time
from typing import Final

from bench.canned import sglang
from bench.canned.bodies import Bodies
from bench.canned.connection import Connection
from bench.canned.engine import Engine
from bench.process import PARENT_POLL_S, raise_open_files

__all__ = ["BurstEngine"]

_BACKLOG: Final = 4096
_SLICE: Final = 32  # answers between two looks: about 1 ms
_TOKENS: Final = 256


class BurstEngine(Engine):
    """Holds every generation until it is told to answer all of them, or an abort comes.

    Args:
        door: the listening socket.
        expected: generations of this burst; what is sent after it began is held.
    """

    def __init__(self, door: socket.socket, expected: int) -> None:
        bodies = Bodies(sglang.answer, response_tokens=_TOKENS, vocab=32000, weight_version="0")
        super().__init__(bodies, duration_s=None, partial_tokens=_TOKENS // 2)
        sglang.speak(self)
        self._door = door
        self._expected = expected
        self._aborted_at: list[float] = []
        self._burst: list[float] = []
        self.routes[b"/shut"] = self._shut
        self.routes[b"/burst"] = self._begin
        self.routes[b"/marks"] = self._marks
        self._abort = self.routes[b"/abort_request"]
        self.routes[b"/abort_request"] = self._marked_abort

    def _shut(self, connection: Connection, _: bytes) -> None:
        """Accept nobody any more, and let the queue of those who wait be as short as it can be."""
        self._loop.remove_reader(self._door)
        self._door.listen(0)
        connection.answer(b"")

    def _begin(self, connection: Connection, _: bytes) -> None:
        connection.answer(b"")
        self._burst.append(time.monotonic())
        self._some(list(self.live)[: self._expected])

    def _some(self, left: list[bytes]) -> None:
        for rid in left[:_SLICE]:
            generation = self.live.get(rid)
            if generation is not None:
                self.answer(generation, _TOKENS, "length")
        if len(left) > _SLICE:
            self._loop.call_soon(self._some, left[_SLICE:])
        else:
            self._burst.append(time.monotonic())

    def _marked_abort(self, connection: Connection, body: bytes) -> None:
        self._aborted_at.append(time.monotonic())
        self._abort(connection, body)

    def _marks(self, connection: Connection, _: bytes) -> None:
        connection.json({"aborted_at": self._aborted_at, "burst": self._burst})


async def _serve(args: argparse.Namespace) -> None:
    raise_open_files()
    door = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    door.setblocking(False)
    engine = BurstEngine(door, args.expected)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), sock=door, backlog=_BACKLOG)
    gc.freeze()
    parent = os.getppid()
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201 - whoever started it waits for it
    while os.getppid() == parent:  # noqa: ASYNC110 - a parent's death sends no event
        await asyncio.sleep(PARENT_POLL_S)


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="tests.support.burst_engine", description=__doc__)
    parser.add_argument("--expected", type=int, required=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
