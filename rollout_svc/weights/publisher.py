"""The trainer's side of an update: it has the weights, and gives them out bucket by bucket.

`await WeightPublisher(client).publish(model.state_dict(), version=7, pause={})` pauses the stage, has every engine on
this machine read the weights where they lie, and resumes it. The service asks for the next bucket when every engine has
the last one (`weights/staging.py`); each is flattened into a buffer of shared memory that is made once and kept.

Invariants:

- A bucket is overwritten only once every engine has it: the next one is asked for then, and by nobody else.
- One bucket is in memory beside the trainer's own tensors. Its buffer is kept from one update to the next: the second
  of the same sizes allocates nothing.
- How a bucket travels is the sender's (`weights/senders/`).
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

from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.bar import Bar, make_bar
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.probe import Probe
from rollout_svc.weights.senders.protocol import Engine, Named, Sender
from rollout_svc.weights.senders.registry import make_sender

if TYPE_CHECKING:
    import torch

__all__ = ["Client", "WeightPublisher"]

_BUCKET_BYTES: Final = 256 * 2**20


class Client(Protocol):
    """Who asks the service for an update: `RolloutClient`, or a `RolloutService` in process."""

    async def update_weights(
        self, version: int, source: Mapping[str, Any], *, pause: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Bring every worker to a weight version."""


class WeightPublisher:
    """Gives out weights; see the module's invariants.

    Attributes:
        transfer_s: what the last update took from the question what will come to the word that every engine has all of
            it, seconds.
    """

    def __init__(self, client: Client, *, way: Way = "shm", bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Make a publisher; nothing is opened before the first update.

        Args:
            client: who asks for the update.
            way: how weights get to the engines: `shm`, through memory that they share with this process.
            bucket_bytes: most bytes of a bucket, and so of each of the two buffers, unless a tensor is larger.
        """
        self.transfer_s = 0.0
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._sender = make_sender(way, bucket_bytes)
        self._token = secrets.token_urlsafe(24)
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._publishing: _Publishing | None = None

    @property
    def allocated(self) -> int:
        """Bytes of buffers that were ever made."""
        return self._sender.allocated

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
        probe: Probe | None = None,
        progress: bool | None = None,
    ) -> Mapping[str, Any]:
        """Bring every worker to these weights.

        Args:
            tensors: by name; from a mapping names, shapes and dtypes are checked by every engine before a byte moves,
                from an iterable as they come, with one bucket of it in memory.
            version: trainer steps whose weights these are.
            pause: arguments of a pause to be made around it; None: the stage is paused already.
            check_finite: have engines refuse NaN and infinity.
            probe: what engines with these weights generate, `Probe.of(model, prompt_ids)`: those that report no
                versions have to show it before they get traffic.
            progress: show a bar on standard error; None: where that is a terminal.

        Returns:
            What `update_weights` answers.

        Raises:
            ServiceError: what `update_weights` raises; the engines have the weights they had.
            RuntimeError: this publisher is at it already.
        """
        if self._publishing is not None:
            raise RuntimeError("this publisher has an update under way")
        await self._open()
        publishing = _Publishing(self._sender, tensors, self._bucket_bytes, check_finite=check_finite)
        publishing.bar = make_bar(f"weights {version}", publishing.total_bytes, wanted=progress)
        self._publishing = publishing
        try:
            source: dict[str, Any] = {"kind": self._sender.way, "publisher": self._url, "token": self._token}
            if probe is not None:
                source["probe"] = probe.as_json()
            return await self._client.update_weights(version, source, pause=pause)
        finally:
            self._publishing = None
            self.transfer_s = publishing.transfer_s
            await publishing.close()

    async def close(self) -> None:
        """Stop listening, and give up the buffers; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await asyncio.to_thread(self._sender.release)

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
            body = await request.json()
            return web.json_response(
                await getattr(publishing, request.path[1:])(body if isinstance(body, dict) else {})
            )
        except (ValueError, OSError) as error:
            return web.json_response({"error": str(error)}, status=400)


class _Publishing:
    """One update under way."""

    def __init__(
        self,
        sender: Sender,
        tensors: Mapping[str, torch.Tensor] | Iterable[Named],
        bucket_bytes: int,
        *,
        check_finite: bool,
    ) -> None:
        self.transfer_s = 0.0
        self._sender = sender
        self.bar: Bar | None = None
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values()) if isinstance(tensors, Mapping) else None
        self._given = 0  # bytes of the bucket that is on its way
        self._manifest = _manifest(tensors) if isinstance(tensors, Mapping) else None
        self._pairs: Iterable[Named] = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._bucket_bytes = bucket_bytes
        self._buckets: Iterator[list[Named]] = iter(())
        self._check_finite = check_finite
        self._working = asyncio.Lock()
        self._began = time.monotonic()

    async def begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What will come, to these engines."""
        self._began = time.monotonic()
        async with self._working:
            openings = await asyncio.to_thread(self._sender.open, _engines(body.get("engines")))
            self._buckets = cut(self._pairs, self._bucket_bytes, "elements" if self._sender.one_dtype else "bytes")
        told = {"manifest": self._manifest, "bytes": self.total_bytes, "check_finite": self._check_finite}
        return told | {"openings": openings}

    async def next(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """The next bucket; whoever asks has loaded the one before."""
        async with self._working:
            return await asyncio.to_thread(self._write)

    async def end(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """It is over, whole or not."""
        await self.close(whole=body.get("whole") is True)
        return {}

    async def close(self, *, whole: bool = False) -> None:
        """Wait for what is being written, and end it; idempotent."""
        async with self._working:
            self._buckets = iter(())
            await asyncio.to_thread(self._sender.close, whole=whole)
        if self.bar is not None:
            self.bar.close()

    def _write(self) -> dict[str, Any]:
        """Have the next bucket ready; every engine has loaded the one before."""
        began = time.monotonic()
        if self.bar is not None and self._given:
            self.bar.loaded(self._given)
        tensors = next(self._buckets, None)
        if tensors is None:
            self.transfer_s = time.monotonic() - self._began
            return {"bodies": None}
        bodies = self._sender.write(tensors)
        self._given = size = sum(tensor.nbytes for _, tensor in tensors)
        return {"bodies": bodies, "bytes": size, "flatten_s": time.monotonic() - began}


def _engines(said: Any) -> list[Engine]:
    """Read who will be told; raises ValueError."""
    try:
        return [Engine(str(one["id"]), str(one["dialect"]), int(one["ranks"])) for one in said]
    except (TypeError, KeyError) as error:
        raise ValueError(f"engines: expected id, dialect and ranks of each, not {said!r:.200}") from error


def _manifest(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    ]
