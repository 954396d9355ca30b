"""A connection to a data plane: HTTP over a socket whose every wait ends by one deadline.

Invariants:

- What arrives is read straight into the memory it is for; no lock of the interpreter is held meanwhile.
- A connection is used by one thread at a time, and again only when its last answer was read to the end.
"""

from __future__ import annotations

import socket
import time
from http.client import HTTPConnection, HTTPResponse
from typing import Any, Final
from urllib.parse import urlsplit

from rollout_svc.errors import ShardFailure

__all__ = ["Connection", "origin_of"]

RECEIVE_BUFFER_BYTES: Final = 4 * 2**20
"""What the kernel may hold for us: while we are elsewhere the sender goes on."""
SCRATCH_BYTES: Final = 64 * 2**10


class _Deadlined(socket.socket):
    """A socket that gives up at a moment, not after a while: one that trickles cannot go on for ever."""

    deadline: float = 0.0

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self.settimeout(left)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._arm()
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self._arm()
        super().sendall(*args, **kwargs)


def origin_of(address: str) -> tuple[str, int, str]:
    """Read host, port and prefix from the address of a data plane.

    Raises:
        ShardFailure: `invalid`: it is no address of one.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme != "http" or host is None or parts.query or parts.fragment:
        raise ShardFailure("invalid", f"{address!r} is no address of a data plane: http://host:port[/prefix]")
    return host, port, parts.path.rstrip("/")


class Connection:
    """One connection.

    Args:
        address: of the data plane.
        token: bearer token; None: it wants none.

    Attributes:
        used: whether it carried an answer before.
        idle_since: monotonic, seconds; when that ended.
    """

    def __init__(self, address: str, token: str | None) -> None:
        host, port, self._prefix = origin_of(address)
        self._http = HTTPConnection(host, port)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._socket: _Deadlined | None = None
        self._response: HTTPResponse | None = None
        self.used = False
        self.idle_since = 0.0

    def send(self, method: str, call: str, body: bytes | None, deadline: float) -> HTTPResponse:
        """Send a request; return the answer, of which the head was read.

        Args:
            method: of HTTP.
            call: `fetch`, `drop`, ….
            body: JSON.
            deadline: monotonic, seconds; also for what is read of the answer.
        """
        if self._socket is None:
            self._socket = self._connected(deadline)
            self._http.sock = self._socket
        self._socket.deadline = deadline
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        self._http.request(method, f"{self._prefix}/{call}", body, headers)
        self._response = self._http.getresponse()
        return self._response

    def _connected(self, deadline: float) -> _Deadlined:
        left = max(deadline - time.monotonic(), 0.001)
        plain = socket.create_connection((self._http.host, self._http.port), timeout=left)
        made = _Deadlined(plain.family, plain.type, plain.proto, fileno=plain.detach())
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        return made

    def reusable(self) -> bool:
        """Take note of the end of an answer; say whether the connection may be used again."""
        self.used = True
        self.idle_since = time.monotonic()
        response, self._response = self._response, None
        return response is not None and response.isclosed() and not response.will_close

    def close(self) -> None:
        """Close it; idempotent."""
        self._http.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def read_whole(response: HTTPResponse, memory: memoryview) -> None:
    """Fill memory from an answer.

    Raises:
        ConnectionError: it ended before.
    """
    at = 0
    while at < memory.nbytes:
        count = response.readinto(memory[at:])
        if count == 0:
            raise ConnectionError(f"the answer ended after {at} of {memory.nbytes} bytes")
        at += count


def skip(response: HTTPResponse, count: int) -> None:
    """Read bytes that nobody wants."""
    scratch = memoryview(bytearray(min(count, SCRATCH_BYTES)))
    while count:
        piece = scratch[: min(count, SCRATCH_BYTES)]
        read_whole(response, piece)
        count -= piece.nbytes
