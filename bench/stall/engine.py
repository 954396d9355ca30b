"""`python -m bench.stall.engine`: a process that answers `POST /base64` and `POST /nested` with 64 MiB, at once.

A thread for each connection, and the kernel copies the body: so the engine takes as little of the machine as it can.
Prints `ready PORT`; ends when its parent does.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import threading
import time
from typing import BinaryIO

from bench.process import PARENT_POLL_S
from bench.stall.bodies import BODY_BYTES, ENCODINGS, body

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)


def _file_of(encoding: str, size: int) -> BinaryIO:
    file = os.fdopen(os.memfd_create(encoding), "w+b")
    file.write(body(encoding, size))
    file.flush()
    return file


def _read_request(connection: socket.socket) -> bytes | None:
    """Read a request; return its path, None where the client left."""
    read = b""
    while b"\r\n\r\n" not in read:
        data = connection.recv(65536)
        if not data:
            return None
        read += data
    head, _, rest = read.partition(b"\r\n\r\n")
    found = _LENGTH.search(head)
    missing = (0 if found is None else int(found[1])) - len(rest)
    while missing > 0:
        data = connection.recv(missing)
        if not data:
            return None
        missing -= len(data)
    return head.split(b" ", 2)[1]


def _serve(connection: socket.socket, files: dict[bytes, BinaryIO]) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (path := _read_request(connection)) is not None:
                size = os.fstat(files[path].fileno()).st_size
                connection.sendall(_HEAD % size)
                sent = 0
                while sent < size:
                    sent += os.sendfile(connection.fileno(), files[path].fileno(), sent, size - sent)
        except OSError:
            return  # the client left


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="bench.stall.engine", description=__doc__)
    parser.add_argument("--bytes", type=int, default=BODY_BYTES, help="of a body")
    options = parser.parse_args()
    files = {b"/%b" % encoding.encode(): _file_of(encoding, options.bytes) for encoding in ENCODINGS}
    parent = os.getppid()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        print("ready", server.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(server, files), daemon=True).start()
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)


def _accept(server: socket.socket, files: dict[bytes, BinaryIO]) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection, files), daemon=True).start()


if __name__ == "__main__":
    main()
