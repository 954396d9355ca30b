"""HTTP/1.1 straight on `asyncio.Protocol`: what has a `Content-Length`, one request at a time, nothing chunked."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, cast

import orjson

if TYPE_CHECKING:
    from bench.canned.engine import Engine

__all__ = ["Connection"]

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_TEXT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
_JSON_HEAD = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection of an engine.

    Attributes:
        waiting_for: the wire id of the generation it waits for.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.waiting_for: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and forget what was waited for."""
        del exc
        self._transport = None
        if self.waiting_for is not None:
            self._engine.forget(self.waiting_for, self)

    def data_received(self, data: bytes) -> None:
        """Answer every whole request that has arrived."""
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end]
            found = _LENGTH.search(head)
            whole = end + 4 + (0 if found is None else int(found[1]))
            if len(self._buffer) < whole:
                return
            body, self._buffer = self._buffer[end + 4 : whole], self._buffer[whole:]
            path, _, query = head.split(b" ", 2)[1].partition(b"?")
            route = self._engine.routes.get(path)
            if route is None:
                self.json({"detail": "Not Found"}, b"404 Not Found")
            else:
                route(self, body or query)  # what is posted without a body says what it wants in the query

    def write(self, answer: bytes) -> None:
        """Send bytes, if there is still someone to read them."""
        if self._transport is not None:
            self._transport.write(answer)

    def answer(self, text: bytes) -> None:
        """Send a 200 of plain text, or of nothing."""
        self.write(_TEXT_HEAD % len(text) + text)

    def json(self, payload: Any, status: bytes = b"200 OK") -> None:
        """Send a JSON answer."""
        body = orjson.dumps(payload)
        self.write(_JSON_HEAD % (status, len(body)) + body)
