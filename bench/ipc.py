"""Case `ipc` of `bench.weights`: buckets on a CUDA device into another process; see there.

`python -m bench.ipc` is that process: it does what LMDeploy's consumer does (`update_params`), with a copy on the
device in place of loading, and answers each line with an empty one.
"""

from __future__ import annotations

import base64
import io
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import orjson
import torch

from bench.report import Point, interleaved, progress
from rollout_svc.engines.updates.lmdeploy import FINISH
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.senders.cuda_ipc import CudaIpcSender
from rollout_svc.weights.senders.protocol import Engine

BUCKET_BYTES: Final = 256 * 2**20
WARM_ROUNDS: Final = 2
METADATA: Final = ("lmdeploy.utils", "FlattenedTensorMetadata")
Tensors = list[tuple[str, torch.Tensor]]


def measure_ipc(make: Callable[[], Tensors], rounds: int) -> list[Point]:
    """Send and copy, by turns; nothing where there is no device."""
    if not torch.cuda.is_available():
        progress("ipc: left out, there is no CUDA device")
        return []
    tensors = [(name, tensor.cuda()) for name, tensor in make()]
    moved = sum(tensor.nbytes for _, tensor in tensors)
    sender = CudaIpcSender(BUCKET_BYTES)
    source, target = (torch.ones(moved, dtype=torch.uint8, device="cuda") for _ in range(2))
    with _Reader() as reader:

        def send() -> float:
            began = time.perf_counter()
            openings = sender.open([Engine("reader", "lmdeploy", 1)])
            for bucket in cut(iter(tensors), BUCKET_BYTES, "elements"):
                reader.take(sender.write(bucket)["reader"])
            reader.take(openings["reader"][FINISH])
            sender.close(whole=True)
            return moved / (time.perf_counter() - began)

        def copy() -> float:
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            return moved / (time.perf_counter() - began)

        for _ in range(WARM_ROUNDS):
            send()
            copy()
        value, floor = interleaved(send, copy, rounds)
    progress(f"ipc: {moved / 2**30:.2f} GiB, {value / 2**30:.1f} GiB/s over {floor / 2**30:.1f} GiB/s")
    return [Point("ipc", value, floor, None, "higher")]


class _Reader:
    """The other process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.ipc"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def take(self, body: Mapping[str, Any]) -> None:
        """Have it load a call; raises RuntimeError where it did not."""
        sink, answers = self._process.stdin, self._process.stdout
        assert sink is not None  # noqa: S101 - piped
        assert answers is not None  # noqa: S101 - piped
        sink.write(orjson.dumps(body) + b"\n")
        sink.flush()
        if not answers.readline():
            raise RuntimeError("the reader has ended: its trouble is above")


class _Metadata:
    """What the pickle names by LMDeploy's class; its fields are set by the unpickler."""

    start_idx: int
    end_idx: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """LMDeploy need not be installed."""
        return _Metadata if (module, name) == METADATA else super().find_class(module, name)


def read() -> None:
    """Load calls until there is no more."""
    buffer: torch.Tensor | None = None
    event: Any = None
    target = torch.empty(0)
    for line in sys.stdin.buffer:
        body = orjson.loads(line)
        parts = _Unpickler(io.BytesIO(base64.b64decode(body["serialized_named_tensors"]))).load()
        if "flattened_tensor" in parts:
            rebuild, arguments = parts["flattened_tensor"]
            buffer = rebuild(*arguments)
        if "event_ipc_handle" in parts:
            handle = parts["event_ipc_handle"]
            event = torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), handle)  # type: ignore[no-untyped-call]
        if parts["metadata"] and buffer is not None:
            if event is not None:
                event.wait()
            if target.numel() < buffer.numel():
                target = torch.empty_like(buffer)
            for meta in parts["metadata"]:
                target[meta.start_idx : meta.end_idx].copy_(buffer[meta.start_idx : meta.end_idx])
            if event is not None:
                event.record()
        if body["finished"]:
            torch.cuda.synchronize()
            buffer = event = None
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    read()
