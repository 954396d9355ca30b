"""Weights read by each engine where they lie on the device, by its own protocol: SGLang's, LMDeploy's, vLLM's.

| engine | layout | buffer |
|---|---|---|
| LMDeploy | elements | one for each dtype, kept; with an event for one engine of one rank, else cloned there |
| SGLang | bytes | one for each bucket |
| vLLM | bytes, each tensor by a handle of its own | the same one |

A buffer of one bucket is torch's to give back: it does once the engine has let go of it, which may be later than its
answer (vLLM keeps what it has of a layer until all of it has come). Of a call that an engine refused before it had
opened what it was sent it never does: that bucket's memory is gone until this process ends.

Invariants:

- Each bucket is flattened once for each layout that the engines of the update need.
- What is sent is written: the device is waited for, or LMDeploy's event orders it.
- An event is offered only on CUDA, where the engine's torch opens it as ours made it, and no more after a bucket was
  refused, or an update failed, under it. Where there is none every call carries the buffer, and the log says so once.
- Tensors on the CPU travel as files of shared memory, in the same words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from rollout_svc.engines.updates.lmdeploy import FINISH, WITH_EVENT
from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads import lmdeploy, sglang, vllm
from rollout_svc.weights.payloads.lmdeploy import Event, LMDeployRound
from rollout_svc.weights.senders.protocol import Bodies, Engine, Named

if TYPE_CHECKING:
    import torch

__all__ = ["CPU_UUID", "CudaIpcSender", "cuda_event"]

CPU_UUID: Final = "cpu"
"""What stands for the UUID of a device where there is none."""
_ELEMENTS: Final = "lmdeploy"
_BYTES: Final = ("sglang", "vllm")
_log = structlog.get_logger("weights")


def cuda_event(device: torch.device) -> Event | None:
    """Make an event that other processes can open; None where there is no such thing, or not for certain."""
    import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

    if device.type != "cuda" or torch.version.cuda is None:
        return None
    with torch.cuda.device(device):
        made: Event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        made.record()  # it is made on the device it is first recorded on
        return made


class CudaIpcSender:
    """Says to engines where tensors lie; see the module's invariants.

    Attributes:
        cloned: why LMDeploy is sent the buffer with every call, to be cloned; None: it is not.
    """

    way: Way = "cuda_ipc"

    def __init__(self, bucket_bytes: int, new_event: Callable[[torch.device], Event | None] = cuda_event) -> None:  # noqa: ARG002
        """Make a sender; nothing is allocated before the first bucket.

        Args:
            bucket_bytes: buckets come cut by it; buffers are as large as they need.
            new_event: makes LMDeploy's event.
        """
        self.allocated = 0
        self.one_dtype = False
        self.cloned: str | None = None
        self._new_event = new_event
        self._engines: tuple[Engine, ...] = ()
        self._round: LMDeployRound | None = None
        self._shape: tuple[int, torch.device] | None = None  # receivers and device of the round
        self._given_out: FlattenedBucket | None = None  # held until every engine has it
        self._events_failed = False
        self._has_event = False

    def open(self, engines: Sequence[Engine]) -> Bodies:
        """Begin an update; LMDeploy is told how it will end.

        Raises:
            ValueError: one of the engines is not served so.
        """
        for engine in engines:
            if engine.dialect not in (_ELEMENTS, *_BYTES):
                raise ValueError(f"{engine.engine_id}: {engine.dialect} takes no weights by {self.way}")
            if engine.dialect == "vllm" and engine.ranks != 1:
                words = "each reads memory of its own device alone, and the trainer's is on one"
                raise ValueError(f"{engine.engine_id}: expected one vLLM worker, not {engine.ranks}: {words}")
        self._engines = tuple(engines)
        self._given_out = None
        if self._round is not None:
            self._round.ended()
        takers = [engine for engine in engines if engine.dialect == _ELEMENTS]
        self.one_dtype = bool(takers)
        return {engine.engine_id: {FINISH: lmdeploy.finish(engine.ranks)} for engine in takers}

    def write(self, tensors: Sequence[Named]) -> Bodies:
        """Flatten a bucket for every layout that is needed, and say where it lies.

        Raises:
            ValueError: the tensors cannot share a bucket.
        """
        if not tensors:
            raise ValueError("expected at least one tensor")
        lmdeploy.synchronize(tensors[0][1])  # what the trainer has queued on any of its streams
        self._given_out = None
        with _on(tensors[0][1]):
            return {**self._write_elements(tensors), **self._write_bytes(tensors)}

    def without_event(self, why: str) -> Bodies:
        """What LMDeploy is told of the last bucket once more; the others have it, and are told nothing.

        Raises:
            ValueError: there was none, or none with an event.
        """
        takers = [engine for engine in self._engines if engine.dialect == _ELEMENTS]
        if self._round is None or not takers:
            raise ValueError("there is no bucket with an event that could come without")
        payloads = self._round.without_event()
        self._events_failed, self._has_event = True, False
        _log.warning("weights.cloned", why=why)  # once: no event follows
        self.cloned = why
        return {takers[0].engine_id: lmdeploy.body(payloads)}

    def close(self, *, whole: bool) -> None:
        """Let go of the last bucket; an event under which an update failed is offered to nobody any more."""
        if self._has_event and self._engines and self._round is not None and not whole and not self._events_failed:
            self._events_failed = True
            self._drop_round()
        self._engines, self._given_out = (), None

    def break_off(self) -> None:
        """Nothing here waits for anybody."""

    def release(self) -> None:
        """Give up the buffers."""
        self._drop_round()
        self._given_out = None

    def _write_elements(self, tensors: Sequence[Named]) -> Bodies:
        takers = [engine for engine in self._engines if engine.dialect == _ELEMENTS]
        if not takers:
            return {}
        sending = self._round_of(sum(engine.ranks for engine in takers), tensors[0][1].device)
        sending.answered()  # this is called once every engine has loaded what came before
        before = sending.allocated
        payloads = iter(sending.bucket(tensors))
        self.allocated += sending.allocated - before
        about = {WITH_EVENT: True} if self._has_event else {}
        bodies = {engine.engine_id: [next(payloads) for _ in range(engine.ranks)] for engine in takers}
        return {engine_id: {**lmdeploy.body(own), **about} for engine_id, own in bodies.items()}

    def _write_bytes(self, tensors: Sequence[Named]) -> Bodies:
        takers = [engine for engine in self._engines if engine.dialect in _BYTES]
        if not takers:
            return {}
        bucket = FlattenedBucket.pack(tensors, "bytes")
        self.allocated += bucket.buffer.nbytes
        lmdeploy.synchronize(bucket.buffer)
        self._given_out = bucket
        return {engine.engine_id: _body_of(bucket, engine) for engine in takers}

    def _round_of(self, receivers: int, device: torch.device) -> LMDeployRound:
        """The round of these receivers; its buffers are kept from one update to the next."""
        if self._round is None or self._shape != (receivers, device):
            self._drop_round()
            event = self._event(receivers, device)
            self._has_event = event is not None
            self._round, self._shape = LMDeployRound(receivers=receivers, event=event), (receivers, device)
        return self._round

    def _event(self, receivers: int, device: torch.device) -> Event | None:
        """An event where it can be relied on; the first time that it cannot is said."""
        if receivers > 1:
            why = f"{receivers} ranks read it, and an event knows the last reading alone"
        elif self._events_failed:
            why = "an update failed under an event"
        elif (event := self._new_event(device)) is not None:
            self.cloned = None
            return event
        else:
            why = f"no event of {device} can be opened by another process"
        if self.cloned is None:
            _log.info("weights.cloned", why=why)
        self.cloned = why
        return None

    def _drop_round(self) -> None:
        self._round, self._shape, self._has_event = None, None, False


def _body_of(bucket: FlattenedBucket, engine: Engine) -> dict[str, Any]:
    if engine.dialect == "sglang":
        return sglang.body([sglang.payload(bucket) for _ in range(engine.ranks)])
    device = bucket.buffer.device
    return vllm.ipc_info(list(bucket.unpack()), None if bucket.buffer.is_cuda else {device: CPU_UUID})


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make its device the current one: events are recorded there."""
    import torch  # noqa: PLC0415

    device: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    return torch.cuda.device(tensor.device) if tensor.is_cuda else device
