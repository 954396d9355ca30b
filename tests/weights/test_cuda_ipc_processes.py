"""Weights by `cuda_ipc` into another process: on a GPU where there is one, on the CPU by files of shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_svc.engines.updates.lmdeploy import FINISH
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.senders.cuda_ipc import CudaIpcSender
from rollout_svc.weights.senders.protocol import Engine
from tests.support.weight_reader import as_json

ROOT = Path(__file__).parents[2]
DIALECTS = ("lmdeploy", "sglang", "vllm")
BUCKET = 4096
on_a_gpu = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA IPC cannot be tried here"),
    ],
)


class Reader:
    """The other process."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.weight_reader", device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self, dialect: str, body: Mapping[str, Any]) -> Any:
        """Have it take a call; what it has then."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"dialect": dialect, "body": body}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0


@pytest.fixture(scope="module", params=["cpu", on_a_gpu])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    """One for all tests of a device: it takes seconds to start."""
    made = Reader(request.param)
    yield made
    made.close()


def tensors(device: str, factor: float) -> list[tuple[str, torch.Tensor]]:
    """Tensors of two dtypes, one strided, one a scalar, in several buckets."""
    made = [
        ("half", torch.arange(999).bfloat16()),
        ("whole", torch.arange(600.0).reshape(20, 30).t()),
        ("scale", torch.tensor(2.0)),
        *((f"t{place}", torch.arange(800.0) + place) for place in range(4)),
    ]
    return [(name, (tensor * factor).to(device)) for name, tensor in made]


def send(reader: Reader, sender: CudaIpcSender, dialects: tuple[str, ...], factor: float) -> None:
    """Send all of it, and compare what the other process has, bit for bit."""
    wanted = tensors(reader.device, factor)
    openings = sender.open([Engine(dialect, dialect, 1) for dialect in dialects])
    has: dict[str, Any] = {}
    for bucket in cut(iter(wanted), BUCKET, "elements" if sender.one_dtype else "bytes"):
        bodies = sender.write(bucket)
        assert bodies.keys() == set(dialects)
        has = {dialect: reader.take(dialect, body) for dialect, body in bodies.items()}
    for dialect, opening in openings.items():
        reader.take(dialect, opening[FINISH])
    sender.close(whole=True)
    assert has == dict.fromkeys(dialects, as_json(dict(wanted)))


@pytest.mark.parametrize("dialects", [*((dialect,) for dialect in DIALECTS), DIALECTS])
def test_another_process_has_what_was_sent(reader: Reader, dialects: tuple[str, ...]) -> None:
    """P26: two updates by our payloads and torch's own rebuilding; LMDeploy's buffer is allocated once."""
    sender = CudaIpcSender(BUCKET)
    send(reader, sender, dialects, 1.0)
    before = sender.allocated
    send(reader, sender, dialects, 3.0)
    if dialects == ("lmdeploy",):
        assert sender.allocated == before
        assert (sender.cloned is None) == (reader.device == "cuda"), "on CUDA the event is real, and opened there"
    sender.release()
