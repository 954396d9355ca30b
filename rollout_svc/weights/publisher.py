"""The trainer's side of an update: it has the weights, and gives them out bucket by bucket.

`await WeightPublisher(client).publish(model.state_dict(), version=7, pause={})` pauses the stage, has every engine on
this machine read the weights where they lie, and resumes it. The service asks for the next bucket when every engine has
the last one (`weights/staging.py`); each is flattened into a buffer of shared memory that is made once and kept.

Invariants:

- A bucket is overwritten only once every engine has it: the next one is asked for then, and by nobody else.
- One bucket is in memory beside the trainer's own tensors. Its buffer is kept from one update to the next: the second
  of the same sizes allocates nothing.
- The buffer travels with the first call of an update, and when it was replaced; the others carry metadata alone.
- Nothing is given to who does not show the token, which is new with each publisher.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from aiohttp import web

from rollout_svc.weights.bucket import FlattenedBucket, cut
from rollout_svc.weights.persistent import SendRound
from rollout_svc.weights.slab import SharedSlab

if TYPE_CHECKING:
    import torch

__all__ = ["Client", "WeightPublisher"]

Named = tuple[str, "torch.Tensor"]
_BUCKET_BYTES: Final = 256 * 2**20
_DTYPE: Final = "uint8"


class Client(Protocol):
    """Who asks the service for an update: `RolloutClient`, or a `RolloutService` in process."""

    async def update_weights(
        self, version: int, source: Mapping[str, Any], *, pause: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Bring every worker to a weight version."""


class WeightPublisher:
    """Gives out weights through shared memory; see the module's invariants.

    Attributes:
        allocated: bytes of buffers that were ever made.
        transfer_s: what the last update took from the question what will come to the word that every engine has all of
            it, seconds.
    """

    def __init__(self, client: Client, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Make a publisher; nothing is opened before the first update.

        Args:
            client: who asks for the update.
            bucket_bytes: most bytes of a bucket, and so of each of the two buffers, unless a tensor is larger.
        """
        self.allocated = 0
        self.transfer_s = 0.0
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._slab: SharedSlab | None = None
        self._generation = 0
        self._token = secrets.token_urlsafe(24)
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._publishing: _Publishing | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def publish(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[Named],
        version: int,
        *,
        pause: Mapping[str, Any] | None = None,
        check_finite: bool = False,
    ) -> Mapping[str, Any]:
        """Bring every worker to these weights.

        Args:
            tensors: by name; from a mapping names, shapes and dtypes are checked by every engine before a byte moves,
                from an iterable as they come, with one bucket of it in memory.
            version: trainer steps whose weights these are.
            pause: arguments of a pause to be made around it; None: the stage is paused already.
            check_finite: have engines refuse NaN and infinity.

        Returns:
            What `update_weights` answers.

        Raises:
            ServiceError: what `update_weights` raises; the engines have the weights they had.
            RuntimeError: this publisher is at it already.
        """
        if self._publishing is not None:
            raise RuntimeError("this publisher has an update under way")
        await self._open()
        self._publishing = _Publishing(self, tensors, check_finite=check_finite)
        try:
            source = {"kind": "shm", "publisher": self._url, "token": self._token}
            return await self._client.update_weights(version, source, pause=pause)
        finally:
            publishing, self._publishing = self._publishing, None
            await publishing.close()

    async def close(self) -> None:
        """Stop listening, and give up the buffers; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    async def _open(self) -> None:
        if self._runner is not None:
            return
        app = web.Application()
        app.add_routes([web.post(f"/{name}", self._answer) for name in ("begin", "next", "end")])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runner = runner
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return web.json_response({"error": "Unauthorized"}, status=401)
        publishing = self._publishing
        if publishing is None:
            return web.json_response({"error": "no update is under way"}, status=409)
        try:
            return web.json_response(await getattr(publishing, request.path[1:])())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)

    def slab(self, nbytes: int) -> tuple[SharedSlab, int]:
        """The buffer, large enough, and its generation: another number for another buffer."""
        if self._slab is None or self._slab.nbytes < nbytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = SharedSlab(max(nbytes, self._bucket_bytes))
            self._generation += 1
            self.allocated += self._slab.nbytes
        return self._slab, self._generation


class _Publishing:
    """One update under way."""

    def __init__(
        self, owner: WeightPublisher, tensors: Mapping[str, torch.Tensor] | Iterable[Named], *, check_finite: bool
    ) -> None:
        self._owner = owner
        self._manifest = _manifest(tensors) if isinstance(tensors, Mapping) else None
        pairs: Iterable[Named] = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._buckets: Iterator[list[Named]] = cut(pairs, owner._bucket_bytes, "bytes")  # noqa: SLF001 - its own
        self._check_finite = check_finite
        self._round = SendRound(events=True)  # of an update: engines may have come since the last one
        self._sent: int | None = None  # generation of the buffer of the bucket that was given out
        self._flattening = asyncio.Lock()
        self._began = time.monotonic()

    async def begin(self) -> dict[str, Any]:
        """What will come."""
        self._began = time.monotonic()
        return {"manifest": self._manifest, "check_finite": self._check_finite}

    async def next(self) -> dict[str, Any]:
        """The next bucket; whoever asks has loaded the one before."""
        async with self._flattening:
            if self._sent is not None:
                self._round.sent(self._sent, _DTYPE)
            return await asyncio.to_thread(self._flatten)

    async def end(self) -> dict[str, Any]:
        """It is over, whole or not."""
        return {}

    async def close(self) -> None:
        """Wait for what is being flattened."""
        async with self._flattening:
            self._buckets = iter(())

    def _flatten(self) -> dict[str, Any]:
        """Write the next bucket into the buffer, which every engine has read."""
        import torch  # noqa: PLC0415 - the trainer has it

        began = time.monotonic()
        tensors = next(self._buckets, None)
        if tensors is None:
            self._owner.transfer_s = time.monotonic() - self._began
            return {"call": None}
        size = sum(-(-tensor.nbytes // 16) * 16 for _, tensor in tensors)
        slab, generation = self._owner.slab(size)
        with slab.writing():
            bucket = FlattenedBucket.pack(tensors, "bytes", into=slab.tensor(torch.uint8))
        parts = self._round.next(generation, _DTYPE)
        self._sent = generation
        call: dict[str, Any] = {
            "metadata": [meta.as_json() for meta in bucket.metadata],
            "layout": "bytes",
            "written": slab.written,
            "require_clone": parts.require_clone,
        }
        if parts.buffer:
            call["buffer"] = {**slab.handle, "dtype": _DTYPE}
        if parts.event:
            call["event"] = {"kind": "sequence", "name": slab.name}
        return {"call": call, "bytes": bucket.used, "flatten_s": time.monotonic() - began}


def _manifest(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    ]
