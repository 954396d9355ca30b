"""Sending much over a connection of an event loop, without holding the loop up: in a thread, on the socket itself.

A transport of asyncio copies what the socket does not take at once, and wakes the loop for every bit of room; a thread
that waits in the kernel needs half of the CPU, and none of the loop's.

Invariants:

- Only what the transport has nothing left to say is followed by the thread's bytes; where that cannot be known, all
  threads are busy, or there is little, they go through the transport.
- A peer that takes nothing for `stall_s` ends the sending; so does a cancellation, at once.
- The socket is closed by the transport and nobody else: a thread has a descriptor of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from aiohttp import web

__all__ = ["Sender"]

THREADS: Final = 8
"""Answers that are sent by threads at the same time."""
PIECE_BYTES: Final = 256 * 2**10
"""What is given to a transport in one turn of the event loop: some 0.05 ms."""
SOCKET_BYTES: Final = 2**20
"""What is given to a socket at once; a peer has `stall_s` for it."""


class Sender:
    """Sends the bodies of answers; belongs to one event loop.

    Args:
        stall_s: how long a peer may take nothing, in seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shards-send")
        self._busy = 0

    async def send(self, request: web.Request, response: web.StreamResponse, data: Sequence[memoryview]) -> None:
        """Send bytes that follow what was written to an answer.

        Raises:
            TimeoutError: the peer took nothing for too long.
            ConnectionError: the peer has gone.
        """
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the peer has gone")
        plain = transport.get_extra_info("sslcontext") is None and not transport.get_write_buffer_size()
        if not plain or self._busy == THREADS or sum(piece.nbytes for piece in data) <= PIECE_BYTES:
            await self._write(response, data)
        else:
            await self._send(transport.get_extra_info("socket").dup(), data)

    async def _write(self, response: web.StreamResponse, data: Sequence[memoryview]) -> None:
        for whole in data:
            for start in range(0, whole.nbytes, PIECE_BYTES):
                async with asyncio.timeout(self._stall_s):
                    await response.write(whole[start : start + PIECE_BYTES])

    async def _send(self, own: socket.socket, data: Sequence[memoryview]) -> None:
        self._busy += 1
        try:
            sending = self._threads.submit(_send_all, own, data, self._stall_s)
            sending.add_done_callback(lambda _: own.close())
            await asyncio.wrap_future(sending)
        except BaseException:
            with contextlib.suppress(OSError):  # it may be closed already
                own.shutdown(socket.SHUT_RDWR)  # so that the thread is not waited for
            raise
        finally:
            self._busy -= 1

    def close(self) -> None:
        """Begin nothing any more; what is under way ends with its connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _send_all(own: socket.socket, data: Sequence[memoryview], stall_s: float) -> None:
    own.settimeout(stall_s)  # of each wait; the descriptor stays non-blocking, as its transport has it
    for whole in data:
        at = 0
        while at < whole.nbytes:
            at += own.send(whole[at : at + SOCKET_BYTES])
