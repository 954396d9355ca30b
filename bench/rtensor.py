"""`python -m bench.rtensor`: what it costs to fetch remote tensors, over a bare copy of the same bytes.

Case `16x4MiB`: `localize` of 16 shards of 4 MiB, whose owner is another process, over loopback. The floor is the same
bytes from the same process over a plain TCP connection, read into memory that is there already. Both in bytes a second.
What was fetched is drained after each round, so that each round fetches, and takes its memory, anew.

Case `bf16`: bytes on the wire, both ways, counted by a relay between the two sockets, over the bytes of the tensors: 16
of 256 KiB in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

import torch

from bench.process import Child
from bench.report import Point, interleaved, print_report, progress
from rollout_svc.tensors.rtensor import RTensor, flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import Fetcher, Node, ShardOwner

SHARDS: Final = 16
SHARD_BYTES: Final = 4 * 2**20
SMALL_BYTES: Final = 256 * 2**10
ROUNDS: Final = 21
WARM_ROUNDS: Final = 3
RATE_BOUND: Final = 0.5
WIRE_BOUND: Final = 1.05
SOCKET_BUFFER_BYTES: Final = 4 * 2**20
ACCEPT_S: Final = 30.0
PIECE_BYTES: Final = 2**20


def serve() -> None:
    """Own the shards, and send the same bytes plainly to whoever sends a byte; until it is terminated."""
    big = [torch.randn(SHARD_BYTES // 4) for _ in range(SHARDS)]
    small = [torch.randn(SMALL_BYTES // 2).bfloat16() for _ in range(SHARDS)]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Node(ShardOwner()) as node, closing(socket.create_server(("127.0.0.1", 0))) as bare:
        remote = {"big": remotize(big, node), "small": remotize(small, node)}
        threading.Thread(target=send_plainly, args=(bare, big), daemon=True).start()
        print("ready", bare.getsockname()[1], flush=True)
        print(json.dumps({name: [one.as_json() for one in ones] for name, ones in remote.items()}), flush=True)
        stop.wait()


def send_plainly(server: socket.socket, tensors: list[torch.Tensor]) -> None:
    """Send all the bytes, tensor after tensor, for each byte that is received."""
    peer, _ = server.accept()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    with peer:
        while peer.recv(1):
            for tensor in tensors:
                peer.sendall(tensor.numpy().data.cast("B"))


class Plain:
    """The floor: reads as many bytes as the tensors have, into memory of its own.

    Args:
        port: where they are sent.
    """

    def __init__(self, port: int) -> None:
        self._peer = socket.create_connection(("127.0.0.1", port), ACCEPT_S)
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._memory = memoryview(bytearray(SHARDS * SHARD_BYTES))

    def rate(self) -> float:
        """Bytes a second."""
        began = time.perf_counter()
        self._peer.sendall(b"!")
        at = 0
        while at < self._memory.nbytes:
            at += self._peer.recv_into(self._memory[at:])
        return at / (time.perf_counter() - began)


class Relay:
    """Stands between two sockets, and counts what passes, both ways; for one connection.

    Args:
        address: where it goes on to.
    """

    def __init__(self, address: str) -> None:
        self.bytes = 0
        self._target = urlsplit(address)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection((str(self._target.hostname), int(self._target.port or 0)), ACCEPT_S)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(PIECE_BYTES):
                self.bytes += len(data)
                target.sendall(data)
        except OSError:
            pass  # the other side is gone: whoever waits there says so


def fetch_rate(fetcher: Fetcher, remote: list[RTensor]) -> float:
    """Bytes a second, from the call until every tensor is there."""
    began = time.perf_counter()
    localize(remote, fetcher)
    took_s = time.perf_counter() - began
    fetcher.buffer.flush_all()
    return sum(one.nbytes for one in remote) / took_s


def measure_rate(remote: list[RTensor], port: int, rounds: int) -> Point:
    """Fetch and copy, by turns."""
    fetcher, plain = Fetcher(), Plain(port)
    for _ in range(WARM_ROUNDS):
        fetch_rate(fetcher, remote)
        plain.rate()
    value, floor = interleaved(lambda: fetch_rate(fetcher, remote), plain.rate, rounds)
    progress(f"16x4MiB: {value / 2**20:.0f} MiB/s over {floor / 2**20:.0f} MiB/s")
    fetcher.close()
    return Point("16x4MiB", value, floor, RATE_BOUND, "higher")


def measure_wire(remote: list[RTensor]) -> Point:
    """Fetch through a relay, and see that the tensors are what they were."""
    relay = Relay(remote[0].shard.owner)
    moved = [RTensor(one.shard._replace(owner=relay.address), one.meta) for one in remote]
    fetcher = Fetcher()
    tensors: list[torch.Tensor] = localize(moved, fetcher)
    size = sum(tensor.nbytes for tensor in tensors)
    if {tensor.dtype for tensor in tensors} != {torch.bfloat16} or len(flatten_shard_ids(moved)) != SHARDS:
        raise RuntimeError("what was fetched is not what is measured")
    fetcher.close()
    progress(f"bf16: {relay.bytes} bytes on the wire for {size} bytes of tensors")
    return Point("bf16", relay.bytes, size, WIRE_BOUND, "lower")


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.rtensor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve", action="store_true", help="be the owner")
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    with Child("bench.rtensor", "--serve") as owner:
        found: dict[str, Any] = owner.read_json(ACCEPT_S)
        remote = {name: [RTensor.from_json(one) for one in ones] for name, ones in found.items()}
        points = [measure_rate(remote["big"], int(owner.ready_line[0]), options.rounds), measure_wire(remote["small"])]
    return 0 if print_report("rtensor", points) else 1


if __name__ == "__main__":
    sys.exit(main())
