"""A batch on its way to a consumer: records as bytes, heavy tensors as references.

Invariants:

- Records are decoded where they arrive, not in the service: what it sends was encoded when each group was done.
- A reference leaves the service inside what Ray serialises, and in no other way: Ray counts it then, and the object
  lives for as long as the service or a consumer holds it.
- What is read of a batch is read until its acknowledgement is sent from here, or its lease ends; whoever reads later is
  told which of the two it was. With the acknowledgement the references go, whoever still has the batch.
- Nothing here runs in the service's loop but `contents`, which copies no tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from rollout_svc.batch import Batch
from rollout_svc.errors import Conflict, NotNow, SpentHandle
from rollout_svc.packing.batch import Row, head, rows
from rollout_svc.packing.batch import pack as pack_tensors
from rollout_svc.packing.parts import unreadable
from rollout_svc.packing.reading import read_batch
from rollout_svc.ray.acks import acks_of
from rollout_svc.tensors import Loan, ReadHandle
from rollout_svc.tensors.ray_store import READ_S, InRay, RayStore

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Borrowed", "Contents", "Encoded", "Packed", "TakenBatch", "contents", "lend", "pack"]


class Contents(NamedTuple):
    """What is needed of a leased batch.

    Attributes:
        batch_id: its id.
        step: it was taken for.
        left_s: seconds until its lease ends.
        record: its record, in pieces of JSON; empty where it travels as tensors.
        experts: what reads the routed experts of a sample, by its id.
        tensors: rows and head, where it is to travel as tensors.
        in_shards: its groups lie in several processes: what is not to be read any more went with one of those.
    """

    batch_id: str
    step: int
    left_s: float
    record: Iterable[bytes] = ()
    experts: Mapping[str, Callable[[], np.ndarray[Any, Any]]] = MappingProxyType({})
    tensors: tuple[list[Row], bytes] | None = None
    in_shards: bool = False


def contents(batch: Batch, left_s: float, *, tensors: bool) -> Contents:
    """Take what is needed of a batch that was just leased; in the service's loop.

    Raises:
        Conflict: it is not lent any more.
    """
    taken = Contents(batch.batch_id, batch.step, left_s)
    try:
        if tensors:
            return taken._replace(tensors=(rows(batch), head(batch)))
        owned = ((sample.sample_id, sample.experts) for group in batch.groups for sample in group.samples)
        experts = {sample_id: heavy.later() for sample_id, heavy in owned if heavy is not None}
    except SpentHandle as error:
        raise _given_up(batch.batch_id, error) from error
    return taken._replace(record=batch.encoded(), experts=experts)


def pack(taken: Contents, client: str | None, acked: Sequence[str]) -> Packed:
    """Make what travels of a batch; may block, on tensors that are not in Ray's store yet.

    Args:
        taken: the batch.
        client: whose it is; None: nobody's who acknowledges by himself.
        acked: what its take has acknowledged.

    Raises:
        Conflict: it is not lent any more.
        NotNow: the store has no room for its tensors; or a shard went with them, and taking the step again gives them.
    """
    expires_at = time.time() + taken.left_s
    experts: dict[str, InRay] = {}
    try:
        if taken.tensors is not None:
            pieces = [bytes(piece) for piece in pack_tensors(*taken.tensors)]
        else:
            pieces = list(taken.record)
            experts = {sample_id: _in_ray(later) for sample_id, later in taken.experts.items()}
    except SpentHandle as error:
        if taken.in_shards:
            raise unreadable(taken.batch_id, error) from error
        raise _given_up(taken.batch_id, error) from error
    sender = Sender(client, tuple(acked), taken.batch_id, taken.step, expires_at)
    return Packed(pieces, experts, sender, tensors=taken.tensors is not None)


def _in_ray(later: Callable[[], np.ndarray[Any, Any]]) -> InRay:
    """The tensor in Ray's store: a reference to where it is, or a copy there that is the consumer's alone."""
    stored = getattr(later, "__self__", None)  # a store's `later` is its `view`, with a reference of its own
    if isinstance(stored, InRay):
        return stored
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    try:
        return RayStore().put(later())
    except ray.exceptions.RayError as error:
        said = f"the object store has no room for the batch's routed experts: {type(error).__name__}: {error}"
        raise NotNow("not_enough", said, detail={"store": "full"}) from error


def lend(experts: Mapping[str, Callable[[], np.ndarray[Any, Any]]]) -> dict[str, Borrowed]:
    """Have tensors in Ray's store, for another process to read or to pass on; may block, as `pack`.

    Raises:
        NotNow: the store has no room for them.
    """
    return {sample_id: Borrowed(sample_id, _in_ray(later)) for sample_id, later in experts.items()}


def _given_up(batch_id: str, error: SpentHandle) -> Conflict:
    message = f"batch {batch_id} was given up before it was sent: {error}"
    return Conflict(message, type="lease_expired", detail={"batch_id": batch_id})


class Sender(NamedTuple):
    """What the consumer has to know beside the batch.

    Attributes:
        client: whose batch it is.
        acked: what its take has acknowledged.
        batch_id: its id.
        step: it was taken for.
        expires_at: end of its lease, wall-clock seconds since the epoch.
    """

    client: str | None
    acked: tuple[str, ...]
    batch_id: str
    step: int
    expires_at: float


class Packed:
    """A batch as it travels; who receives it gets a `TakenBatch`."""

    __slots__ = ("_experts", "_pieces", "_sender", "_tensors")

    def __init__(self, pieces: list[bytes], experts: dict[str, InRay], sender: Sender, *, tensors: bool) -> None:
        self._pieces = pieces
        self._experts = experts
        self._sender = sender
        self._tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._pieces, self._experts, self._sender, self._tensors)


class Encoded:
    """A record as it travels, in pieces of JSON; who receives it gets the record."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __reduce__(self) -> tuple[Any, ...]:
        return _decoded, (self._pieces,)


class TakenBatch(dict[str, Any]):
    """The record of a batch, as the control API answers it, with its heavy tensors beside it."""

    def __init__(self, record: Mapping[str, Any], experts: dict[str, InRay], loan: TimedLoan) -> None:
        super().__init__(record)
        self._experts = experts
        self._loan = loan

    def take_experts(self) -> dict[str, ReadHandle]:
        """Routed experts by sample id, of those that have some: `(tokens - 1, moe_layers, top_k)`, uint8 or uint16.

        What was read stays readable. A batch that was taken as tensors has them there.

        Raises:
            SpentHandle: the batch is not lent any more; says why.
        """
        if self._loan.ended_by is not None:
            raise SpentHandle(f"routed experts of batch {self['batch_id']} were asked for after {self._loan.ended_by}")
        until = self._loan.expires_at
        return {
            name: ReadHandle(name, Borrowed(name, stored, until), self._loan) for name, stored in self._experts.items()
        }

    def end(self, by: str) -> None:
        """End its loan, and let go of its tensors; called for whoever acknowledges it."""
        self._loan.end(by)
        for stored in self._experts.values():
            stored.free()

    def __reduce__(self) -> tuple[Any, ...]:
        experts = {} if self._loan.ended_by is not None else self._experts
        return TakenBatch, (dict(self), experts, self._loan)


class Borrowed:
    """One sample's tensor, where it lies; `ReadHandle` reads it."""

    __slots__ = ("_name", "_stored", "_until", "nbytes", "shape")

    def __init__(self, name: str, stored: InRay, until: float = math.inf) -> None:
        """Make one of what is lent until `until`, wall-clock seconds since the epoch; infinite: another ends it."""
        self.nbytes = stored.nbytes
        self.shape = stored.shape
        self._name = name
        self._stored = stored
        self._until = until

    def read(self) -> Any:
        """The tensor.

        Raises:
            SpentHandle: it was given up, or lost with the service.
            TimeoutError: it did not come while it was lent.
        """
        import ray  # noqa: PLC0415 - as above

        try:
            return self._stored.view(min(READ_S, self._until - time.time()))
        except TimeoutError as error:
            raise TimeoutError(f"routed experts of {self._name}: {error}") from None
        except ValueError as error:
            raise SpentHandle(f"routed experts of {self._name} were read after they were given up") from error
        except ray.exceptions.ObjectLostError as error:
            said = "were lost with the process that held them: take the same step again"
            raise SpentHandle(f"routed experts of {self._name} {said}") from error

    def later(self) -> Callable[[], Any]:
        """What reads the tensor later, also after the ack."""
        return self._stored.later()

    def release(self, by: str) -> bool:  # noqa: ARG002 - as `Heavy` says
        """Nothing: it is the batch's."""
        return False


class TimedLoan(Loan):
    """A loan that ends by itself."""

    __slots__ = ("_batch_id", "expires_at")

    def __init__(self, batch_id: str, expires_at: float) -> None:
        """Make one that ends at `expires_at`, wall-clock seconds since the epoch."""
        super().__init__()
        self._batch_id = batch_id
        self.expires_at = expires_at

    @property
    def ended_by(self) -> str | None:
        """What ended it; None: it is in force."""
        if self._ended_by is None and time.time() >= self.expires_at:
            self.end(f"the lease of batch {self._batch_id} ended")
        return self._ended_by


def _arrived(pieces: list[bytes], experts: dict[str, InRay], sender: Sender, tensors: bool) -> TakenBatch:
    raw = b"".join(pieces)
    record = read_batch(raw) if tensors else orjson.loads(raw)
    batch = TakenBatch(record, experts, TimedLoan(sender.batch_id, sender.expires_at))
    acks = acks_of(sender.client)
    if acks is not None:
        acks.answered(sender.acked)
        acks.received(sender.batch_id, sender.step, batch)
    return batch


def _decoded(pieces: list[bytes]) -> Any:
    return orjson.loads(b"".join(pieces))
