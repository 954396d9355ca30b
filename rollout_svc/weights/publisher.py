"""The trainer's side of an update: it has the weights, and gives them out bucket by bucket.

`await WeightPublisher(client).publish(model.state_dict(), version=7, pause={})` pauses the stage, has every engine on
this machine read the weights where they lie, and resumes it. The service asks for the next bucket when every engine has
the last one (`weights/staging.py`); how each is flattened, and where, is the way's (`weights/senders/`).

Invariants:

- A bucket is overwritten only once every engine has it: the next one is asked for then, and by nobody else.
- One bucket is in memory beside the trainer's own tensors. Its buffer is kept from one update to the next: the second
  of the same sizes allocates nothing.
- How a bucket travels is the sender's (`weights/senders/`).
- Asked again for the same bucket it gives the same: an answer was lost. Asked for it without its event (`events:
  false`) it gives that from then on. Nobody is given one out of turn, and a stream
  that failed has no end.
- Where engines do not look themselves, an update that lacks what the last whole one had is refused: a mapping before
  anybody is asked for anything, a stream instead of its end.
- Nothing is given to who does not show the token, which is new with each update: the service may go on with one that
  its caller has left.
- No thread writes to a buffer that was given up.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from aiohttp import web

from rollout_svc.dense import lack_of
from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.bar import Bar, make_bar
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.inventory import Inventory
from rollout_svc.weights.names import Kind
from rollout_svc.weights.probe import Probe
from rollout_svc.weights.senders.protocol import Engine, Named, Reissuing, Sender
from rollout_svc.weights.senders.registry import make_sender
from rollout_svc.weights.threads import off_loop

if TYPE_CHECKING:
    import torch

__all__ = ["Client", "WeightPublisher"]

_BUCKET_BYTES: Final = 256 * 2**20
_OVER: Final = "the update is over"
_LOOKING: Final[frozenset[Way]] = frozenset({"shm"})  # ways whose engines refuse themselves what does not fit


class Client(Protocol):
    """Who asks the service for an update: `RolloutClient`, or a `RolloutService` in process."""

    async def update_weights(
        self, version: int, source: Mapping[str, Any], *, pause: Mapping[str, Any] | None = None, force: bool = False
    ) -> Mapping[str, Any]:
        """Bring every worker to a weight version."""


class WeightPublisher:
    """Gives out weights; see the module's invariants.

    Attributes:
        transfer_s: what the last update took from the question what will come to the word that every engine has all of
            it, seconds.
    """

    def __init__(
        self,
        client: Client,
        *,
        way: Way | Sender = "shm",
        bucket_bytes: int = _BUCKET_BYTES,
        host: str = "127.0.0.1",
    ) -> None:
        """Make a publisher; nothing is opened before the first update.

        Args:
            client: who asks for the update.
            way: how weights get to the engines: `shm`, through memory that they share with this process; `cuda_ipc`,
                from the device they are on, by SGLang's, LMDeploy's and vLLM's own protocols; `distributed`, through a
                `torch.distributed` group; or a sender of your own making, with settings.
            bucket_bytes: most bytes of a bucket, and so of its buffer, unless a tensor is larger.
            host: address of this machine on which the service asks for the weights.

        Raises:
            ValueError: there is no such way, or `bucket_bytes` is below 1.
        """
        if bucket_bytes < 1:
            raise ValueError(f"expected buckets of at least 1 byte, not {bucket_bytes}")
        self.transfer_s = 0.0
        self._host = host
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._sender: Sender = make_sender(way, bucket_bytes) if isinstance(way, str) else way
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._publishing: _Publishing | None = None
        self._known: Mapping[str, Kind] | None = None  # what the last whole update had

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
        force: bool = False,
        probe: Probe | None = None,
        progress: bool | None = None,
        check_names: bool = True,
    ) -> Mapping[str, Any]:
        """Bring every worker to these weights.

        Args:
            tensors: by name; from a mapping names, shapes and dtypes are checked by every engine before a byte moves,
                from an iterable as they come, with one bucket of it in memory.
            version: trainer steps whose weights these are.
            pause: arguments of a pause to be made around it; None: the stage is paused already.
            check_finite: have engines refuse NaN and infinity.
            force: also where the fleet has this version already, or a later one.
            probe: what engines with these weights generate, `Probe.of(model, prompt_ids)`: those that report no
                versions have to show it before they get traffic.
            progress: show a bar on standard error; None: where that is a terminal.
            check_names: refuse weights that lack a tensor of this publisher's last whole update, or have it in another
                shape; ways whose engines look themselves, as `shm`, do so in any case.

        Returns:
            What `update_weights` answers.

        Raises:
            ServiceError: what `update_weights` raises; the engines have the weights they had.
            TypeError: these are no tensors by name; nothing was stopped.
            RuntimeError: this publisher is at it already.
            ValueError: a mapping is empty, or lacks what is to be there; nobody was asked for anything.
        """
        if self._publishing is not None:
            raise RuntimeError("this publisher has an update under way")
        _refuse_other(tensors)
        inventory = self._inventory(tensors, check_names=check_names)
        publishing = _Publishing(self._sender, tensors, self._bucket_bytes, inventory, check_finite=check_finite)
        publishing.bar = make_bar(f"weights {version}", publishing.total_bytes, wanted=progress)
        self._publishing = publishing
        taken = False
        try:
            await self._open()
            source: dict[str, Any] = {"kind": self._sender.way, "publisher": self._url, "token": publishing.token}
            if probe is not None:
                source["probe"] = probe.as_json()
            record = await self._client.update_weights(version, source, pause=pause, force=force)
            taken = all(one.get("ok") or "skipped" in one for one in record.get("workers", {}).values())
            if inventory.whole:
                self._known = inventory.sent
            return record
        finally:
            self.transfer_s = publishing.transfer_s
            try:
                await publishing.close(whole=taken)
            finally:
                self._publishing = None

    def _inventory(self, tensors: Mapping[str, torch.Tensor] | Iterable[Named], *, check_names: bool) -> Inventory:
        """What is to be there, for what will be sent; of a mapping it is looked at now. Raises ValueError."""
        known = self._known if check_names and self._sender.way not in _LOOKING else None
        if isinstance(tensors, Mapping):
            looking = Inventory(known)
            looking.add(tensors.items())
            looking.end()
        return Inventory(known)

    async def close(self) -> None:
        """Stop listening, and give up the buffers; idempotent. An update under way fails."""
        runner, self._runner = self._runner, None
        if self._publishing is not None:
            await self._publishing.close()
        if runner is not None:
            await runner.cleanup()
        await off_loop(self._sender.release)

    async def _open(self) -> None:
        if self._runner is not None:
            return
        app = web.Application()
        app.add_routes([web.post(f"/{name}", self._answer) for name in ("begin", "next", "end")])
        runner = web.AppRunner(app, access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, self._host, 0).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{shown}:{runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        publishing = self._publishing
        if publishing is None:
            return web.json_response({"error": "no update is under way"}, status=409)
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {publishing.token}".encode()):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            body = await request.json()
            return web.json_response(
                await getattr(publishing, request.path[1:])(body if isinstance(body, dict) else {})
            )
        except (ValueError, OSError) as error:
            return web.json_response({"error": str(error)}, status=400)
        except Exception as error:  # noqa: BLE001 - a stream of tensors is the trainer's own code
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)


class _Publishing:
    """One update under way.

    Attributes:
        token: what the service shows for it.
        transfer_s: as the publisher's.
    """

    def __init__(
        self,
        sender: Sender,
        tensors: Mapping[str, torch.Tensor] | Iterable[Named],
        bucket_bytes: int,
        inventory: Inventory,
        *,
        check_finite: bool,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.transfer_s = 0.0
        self._sender = sender
        self._inventory = inventory
        self.bar: Bar | None = None
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values()) if isinstance(tensors, Mapping) else None
        self._under_way = 0  # bytes of the bucket that is on its way
        self._manifest = _manifest(tensors) if isinstance(tensors, Mapping) else None
        self._pairs: Iterable[Named] = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._bucket_bytes = bucket_bytes
        self._buckets: Iterator[list[Named]] = iter(())
        self._check_finite = check_finite
        self._begun: dict[str, Any] | None = None
        self._given = -1  # the bucket that was given out last, counted from 0
        self._last: dict[str, Any] = {}
        self._reissued = False  # the last one, without its event
        self._refusal = "no update was begun here"
        self._working = asyncio.Lock()
        self._began = time.monotonic()
        self._any = False

    async def begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What will come, to these engines."""
        async with self._working:
            if self._refusal == _OVER:
                raise ValueError(_OVER)
            if self._begun is None:
                self._began = time.monotonic()
                openings = await off_loop(partial(self._sender.open, _engines(body.get("engines"))))
                self._buckets = cut(self._pairs, self._bucket_bytes, "elements" if self._sender.one_dtype else "bytes")
                told = {"manifest": self._manifest, "bytes": self.total_bytes, "check_finite": self._check_finite}
                self._begun = told | {"openings": openings}
                self._refusal = ""
            return self._begun

    async def next(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Bucket number `bucket`; whoever asks has loaded the one before.

        Raises:
            ValueError: it is not the turn of that one.
        """
        async with self._working:
            if self._refusal:
                raise ValueError(self._refusal)
            following = self._given + 1
            asked = body.get("bucket", following)
            if asked == self._given >= 0:
                if body.get("events") is False and not self._reissued:
                    self._last = await off_loop(partial(self._without_event, str(body.get("why", ""))))
                    self._reissued = True
                return self._last
            if asked != following:
                raise ValueError(f"expected to be asked for bucket {following}, not {asked!r:.100}")
            try:
                self._last = await off_loop(self._write)
            except BaseException as error:
                self._refusal = f"bucket {following} could not be made: {type(error).__name__}: {error}"
                raise
            self._given, self._reissued = following, False
            return self._last

    async def end(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """It is over, whole or not."""
        await self.close(whole=body.get("whole") is True)
        return {}

    async def close(self, *, whole: bool = False) -> None:
        """Wait for what is being written, and end it; idempotent."""
        if not whole and self._working.locked():
            await off_loop(self._sender.break_off)  # else an engine that hangs would hold the trainer up
        async with self._working:
            self._buckets, self._refusal = iter(()), _OVER
            await off_loop(partial(self._sender.close, whole=whole))
        if self.bar is not None:
            self.bar.close()

    def _without_event(self, why: str) -> dict[str, Any]:
        if not isinstance(self._sender, Reissuing) or not self._last.get("bodies"):
            raise ValueError(f"buckets by {self._sender.way} come with no event: {why}")
        return {**self._last, "bodies": self._sender.without_event(why), "flatten_s": 0.0}

    def _write(self) -> dict[str, Any]:
        """Have the next bucket ready; every engine has loaded the one before."""
        began = time.monotonic()
        if self.bar is not None and self._under_way:
            self.bar.loaded(self._under_way)
        tensors = next(self._buckets, None)
        if tensors is None:
            if not self._any:
                raise ValueError("there was no tensor to send")
            self._inventory.end()
            self.transfer_s = time.monotonic() - self._began
            return {"bodies": None}
        self._any = True
        self._inventory.add(tensors)
        bodies = self._sender.write(tensors)
        self._under_way = size = sum(tensor.nbytes for _, tensor in tensors)
        return {"bodies": bodies, "bytes": size, "flatten_s": time.monotonic() - began}


def _engines(said: Any) -> list[Engine]:
    """Read who will be told; raises ValueError."""
    try:
        return [
            Engine(str(one["id"]), str(one["dialect"]), int(one["ranks"]), float(one.get("since", 0.0))) for one in said
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"engines: expected id, dialect and ranks of each, not {said!r:.200}") from error


def _refuse_other(tensors: object) -> None:
    """Raise TypeError for what can be seen to be no tensors by name, ValueError where there are none."""
    import torch  # noqa: PLC0415 - the trainer has it

    if not isinstance(tensors, Mapping):
        if not isinstance(tensors, Iterable) or isinstance(tensors, torch.Tensor | str | bytes):
            raise TypeError(f"expected tensors by name, or pairs of them, not {type(tensors).__name__}")
        return
    if not tensors:
        raise ValueError("expected at least one tensor: there is none to send")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"expected names that are strings, not {name!r:.100}")
        lack = lack_of(tensor) if isinstance(tensor, torch.Tensor) else f"it is {type(tensor).__name__}"
        if lack is not None:
            raise TypeError(f"expected dense tensors; {name!r}: {lack}")


def _manifest(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    ]
