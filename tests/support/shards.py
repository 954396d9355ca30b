"""Data planes that lie, for those who fetch from them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson

Script = Callable[[socket.socket], None]
"""What is done with a connection once its first request has arrived; afterwards it is closed."""


@contextmanager
def scripted(*scripts: Script) -> Iterator[str]:
    """Serve one connection after the other, each as its script says, over plain sockets; gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=_serve, args=(server, scripts), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    thread.join(10)


def _serve(server: socket.socket, scripts: tuple[Script, ...]) -> None:
    for script in scripts:
        try:
            peer, _ = server.accept()
        except OSError:  # the test has ended without it
            return
        with peer:
            peer.settimeout(10)
            read_request(peer)
            try:
                script(peer)
            except OSError:
                continue  # whoever asked has had enough


def read_request(peer: socket.socket) -> bytes:
    """Read one request, head and body; empty when the other side has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := peer.recv(65_536)):
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += peer.recv(65_536)
    return data


def answer(body: bytes, length: int | None = None) -> bytes:
    """Make an answer, which may claim another length than it has."""
    claimed = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % claimed + body


def framed(records: list[dict[str, object]], data: bytes = b"") -> bytes:
    """Make the body of an answer to a fetch."""
    head = orjson.dumps({"shards": records})
    return len(head).to_bytes(4, "little") + head + data
