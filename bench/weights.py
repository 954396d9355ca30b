"""`python -m bench.weights`: what new weights cost on their way into an engine of this machine.

Case `flatten`: 300 tensors of a model of half a billion parameters into a persistent buffer, in bytes a second. The
floor is `torch`'s copy of as many bytes from one buffer into another.

Case `shm`: an update of 1 GiB through a service into `rollout-svc engine --model wide`, from the call of the publisher
to its answer, in bytes a second; the stage is paused before and stays so. The floor is the two copies that it needs,
from memory into a buffer and from there into other memory, by `torch`, in this process. First updates, which take
the memory, are not measured.

Case `alloc`: bytes of buffer that all updates after the first have newly allocated, here and in the engine's process.
The floor is the bytes that one of them moves.

Case `keep`: an update of the same bytes amid requests that the engine has frozen: from the word of the pause that they
stand to the answer of the resume, in seconds. Until that word the engine makes tokens, or gives up the step it is in:
that is printed and not counted. The floor is the transfer in the same update alone:
from when the publisher is asked what will come to when every engine has the last bucket.
Case `ipc`, where there is a CUDA device and left out with a word elsewhere: the same tensors as of `flatten`, on the
device, in buckets of 256 MiB through LMDeploy's persistent buffer and event into another process that copies them to
memory of its own, in bytes a second. The floor is one copy of as many bytes on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median
from typing import Final

import aiohttp
import torch

from bench.ipc import measure_ipc
from bench.process import Child
from bench.report import Point, interleaved, print_report, progress
from bench.served import Served, Trainer
from rollout_svc import RolloutClient
from rollout_svc.embedded.model import PRESETS, TinyTransformer
from rollout_svc.errors import ServiceError
from rollout_svc.weights.bucket import FlattenedBucket, lay_out
from rollout_svc.weights.publisher import WeightPublisher

ROUNDS: Final = 11
WARM_ROUNDS: Final = 2
FLATTEN_BOUND: Final = 0.8
SHM_BOUND: Final = 0.7
KEEP_BOUND: Final = 1.2
ALLOC_BOUND: Final = 0.0
RUNNING: Final = 4
"""Requests that are frozen at every `keep`."""
LAYERS: Final = 24
WIDTH: Final = 896
FEED: Final = 4864
KEYS: Final = 128
LAYER: Final = (
    *((WIDTH, WIDTH), (WIDTH,), (KEYS, WIDTH), (KEYS,), (KEYS, WIDTH), (KEYS,), (WIDTH, WIDTH)),
    *((FEED, WIDTH), (FEED, WIDTH), (WIDTH, FEED), (WIDTH,), (WIDTH,)),
)
VOCABULARY_SHARDS: Final = ((13812, WIDTH),) * 11
"""With a last norm these make 300 tensors, 0.49 billion parameters."""
ENGINE_START_S: Final = 120.0
DEADLINE_S: Final = 60.0
"""Of a pause, seconds: prefilling 128 tokens on one core takes this engine a while."""
POLL_S: Final = 0.02
PIECE_BYTES: Final = 256 * 2**20
"""As the buffer of a publisher."""
MAX_TOKENS: Final = 100
"""Of an answer: with its prompt it has to fit the engine's context."""


def half_a_billion() -> list[tuple[str, torch.Tensor]]:
    """Make 300 tensors, bfloat16."""
    shapes = [*VOCABULARY_SHARDS, *(shape for _ in range(LAYERS) for shape in LAYER), (WIDTH,)]
    return [(f"t{place}", torch.ones(shape, dtype=torch.bfloat16)) for place, shape in enumerate(shapes)]


def measure_flatten(tensors: list[tuple[str, torch.Tensor]], rounds: int) -> Point:
    """Flatten and copy, by turns, into buffers that are there."""
    metadata = ((name, tuple(tensor.shape), "uint8", tensor.itemsize) for name, tensor in tensors)
    _, size = lay_out(metadata, "bytes")
    moved = sum(tensor.nbytes for _, tensor in tensors)
    buffer, plain, target = (torch.ones(size, dtype=torch.uint8) for _ in range(3))

    def flatten() -> float:
        began = time.perf_counter()
        FlattenedBucket.pack(tensors, "bytes", into=buffer)
        return moved / (time.perf_counter() - began)

    def copy() -> float:
        began = time.perf_counter()
        target[:moved].copy_(plain[:moved])
        return moved / (time.perf_counter() - began)

    for _ in range(WARM_ROUNDS):
        flatten()
        copy()
    value, floor = interleaved(flatten, copy, rounds)
    progress(f"flatten: {len(tensors)} tensors, {value / 2**30:.2f} GiB/s over {floor / 2**30:.2f} GiB/s")
    return Point("flatten", value, floor, FLATTEN_BOUND, "higher")


class TwoCopies:
    """The floor of `shm`: as many bytes into one buffer, and from there into other memory, all of it there already.

    Args:
        nbytes: of all the tensors.
        piece_bytes: of the buffer.
    """

    def __init__(self, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._buffer = torch.ones(piece_bytes, dtype=torch.uint8)
        self.source, self.target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def seconds(self) -> float:
        """Make both, piece by piece: in larger pieces it is no faster."""
        began = time.perf_counter()
        piece = self._buffer.numel()
        for start in range(0, self.source.numel(), piece):
            source, target = (flat[start : start + piece] for flat in (self.source, self.target))
            through = self._buffer[: source.numel()]
            through.copy_(source)
            target.copy_(through)
        return time.perf_counter() - began


class Updates:
    """Updates of one engine through one service.

    Attributes:
        freeze_s: of each update around which the engine was frozen, from the call of the pause to its word.
        keep_s: of each of those, from the word of the pause to the answer of the resume.
        transfer_s: of each of those, from the first bucket that was asked for to the last that every engine had.
    """

    def __init__(self, client: RolloutClient, publisher: WeightPublisher, engine: str) -> None:
        self.freeze_s: list[float] = []
        self.keep_s: list[float] = []
        self.transfer_s: list[float] = []
        self._client = client
        self._publisher = publisher
        self._engine = engine
        self._version = 0
        with torch.device("meta"):
            model = TinyTransformer(PRESETS["wide"])
        self.tensors = {name: torch.full(value.shape, 0.01) for name, value in model.named_parameters()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    async def update(self) -> float:
        """Publish the tensors as the next version; seconds."""
        self._version += 1
        began = time.perf_counter()
        try:
            await self._publisher.publish(self.tensors, self._version)
        except ServiceError as error:
            raise RuntimeError(f"{error}: {error.detail}") from error
        return time.perf_counter() - began

    async def keep(self) -> None:
        """Publish amid running requests, which are frozen meanwhile."""
        await self._until_running()
        asked = time.perf_counter()
        report = await self._client.pause(mode="keep", kv="keep", deadline_s=DEADLINE_S)
        stood = time.perf_counter()
        await self.update()
        await self._client.resume()
        if not report["clean"]:
            raise RuntimeError(f"the engine did not freeze: {report}")
        self.freeze_s.append(stood - asked)
        self.keep_s.append(time.perf_counter() - stood)
        self.transfer_s.append(self._publisher.transfer_s)

    async def allocated(self) -> int:
        """Bytes of buffers that were ever made for it, here and in the engine."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._engine}/server_info") as answer:
            return self._publisher.allocated + int((await answer.json())["weight_staging_bytes"])

    async def _until_running(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (await self._client.status())["lanes"]["train"]["in_flight"] < RUNNING:
            if time.monotonic() > deadline:
                raise RuntimeError("the engine runs no requests to be frozen")
            await asyncio.sleep(POLL_S)


async def measure_updates(service: Served, engine: str, rounds: int) -> list[Point]:
    """Update the paused stage and copy, by turns; then update the running one."""
    async with RolloutClient(service.url) as client, WeightPublisher(client) as publisher:
        updates = Updates(client, publisher, engine)
        copies = TwoCopies(updates.nbytes)
        await client.pause(mode="abort", deadline_s=DEADLINE_S)
        await updates.update()
        before = await updates.allocated()
        pairs = [(await updates.update(), copies.seconds()) for _ in range(WARM_ROUNDS + rounds)][WARM_ROUNDS:]
        shm_s, copies_s = (median(column) for column in zip(*pairs, strict=True))
        progress(f"shm: {shm_s * 1e3:.0f} ms over {copies_s * 1e3:.0f} ms for {updates.nbytes / 2**20:.0f} MiB")
        await client.resume()
        for _ in range(rounds):
            await updates.keep()
        keep_s, transfer_s = median(updates.keep_s), median(updates.transfer_s)
        progress(
            f"keep: {keep_s * 1e3:.0f} ms over {transfer_s * 1e3:.0f} ms; before it the engine came to a stand in "
            f"{median(updates.freeze_s) * 1e3:.0f} ms"
        )
        grown = await updates.allocated() - before
    return [
        Point("shm", updates.nbytes / shm_s, updates.nbytes / copies_s, SHM_BOUND, "higher"),
        Point("alloc", grown, updates.nbytes, ALLOC_BOUND, "lower"),
        Point("keep", keep_s, transfer_s, KEEP_BOUND, "lower"),
    ]


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds: expected at least 1, not {rounds}")
    points = [measure_flatten(half_a_billion(), rounds), *measure_ipc(half_a_billion, rounds)]
    flags = ("engine", "--model", "wide", "--port", "0")
    with Child("rollout_svc", *flags, ready="engine.ready", timeout_s=ENGINE_START_S) as engine:
        url = engine.ready_line[0].removeprefix("url=")
        with Served([url], RUNNING, MAX_TOKENS, group_size=1) as service, Trainer(service.url, RUNNING):
            points += asyncio.run(measure_updates(service, url, rounds))
    return 0 if print_report("weights", points) else 1


if __name__ == "__main__":
    sys.exit(main())
