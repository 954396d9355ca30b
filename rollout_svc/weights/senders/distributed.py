"""Weights through a `torch.distributed` group: this process is rank 0, every rank of every engine one of the others.

There is a group for each kind of engine, since each takes a bucket in its own way: SGLang and LMDeploy as one flat
tensor, vLLM tensor by tensor. What an engine is told of a bucket:

| key | is |
|---|---|
| `group` | `{master_address, master_port, rank_offset, world_size, group_name, backend, timeout_s, unique_id?}` |
| `join` | it is not in the group yet: it is to join first |
| `names`, `dtypes`, `shapes` | of the tensors, in the order in which they are sent |

`unique_id`, base64, is how vLLM meets by NCCL: it does not look for torch's keys at the address. Each engine is told,
at the opening of an update, which groups to `leave`: it may be in them, and they are no more.

Invariants:

- No engine is waited for before all of them have agreed to the update: the first bucket has them join.
- A group is kept from one update to the next as long as its engines are the same processes.
- What is being sent lies in a buffer of our own until all have it; one that may still be read is not written to again.
- A broadcast that failed closes its group, at once, and so ends the waiting of the engines that are left.
- Nothing takes longer than `timeout_s`.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.collective import Backend, Collective, CollectiveError, Doing, Meeting, unique_id
from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.bucket import ALIGNMENT, FlattenedBucket
from rollout_svc.weights.senders.protocol import Bodies, Engine, Named

if TYPE_CHECKING:
    import torch

__all__ = ["DistributedSender"]

_TENSOR_BY_TENSOR: Final = "vllm"  # whose groups begin with a sum, and know no flat buckets
_TIMEOUT_S: Final = 60.0  # for a bucket to reach everybody


class DistributedSender:
    """Broadcasts buckets; see the module's invariants."""

    way: Way = "distributed"
    one_dtype = True

    def __init__(
        self,
        bucket_bytes: int,
        *,
        host: str = "127.0.0.1",
        backend: Backend = "gloo",
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Make a sender; nothing is opened before the first bucket.

        Args:
            bucket_bytes: of the buffer, unless a tensor is larger.
            host: address of this machine that the engines reach.
            backend: `nccl` for engines on GPUs, with the tensors on one; `gloo` otherwise.
            timeout_s: most seconds for a bucket to reach everybody, the making of the group included.
        """
        self.allocated = 0
        self._bucket_bytes = bucket_bytes
        self._host = host
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._open = False
        self._parties: dict[str, _Party] = {}  # by kind of engine
        self._members: dict[str, str] = {}  # the name of the group that an engine is in, by its id
        self._buffer: torch.Tensor | None = None
        self._sending: list[Doing[None]] = []
        self._wrote = False  # in this update: a group that was not used is well

    def open(self, engines: Sequence[Engine]) -> Bodies:
        """Take the groups that fit these engines, and tell each which of its old ones is no more."""
        if self._open:
            self.close(whole=False)
        kinds = {kind: tuple(e for e in engines if e.dialect == kind) for kind in sorted({e.dialect for e in engines})}
        for kind, party in list(self._parties.items()):
            if party.engines != kinds.get(kind) or not party.usable:
                self._parties.pop(kind).close()
        for kind, members in kinds.items():
            if kind not in self._parties:
                self._parties[kind] = _Party(kind, members, self._host, self._backend, self._timeout_s)
        now = {engine.engine_id: self._parties[engine.dialect].name for engine in engines}
        told = {
            engine_id: {"leave": [self._members[engine_id]] if self._members.get(engine_id, name) != name else []}
            for engine_id, name in now.items()
        }
        self._members = now
        self._open, self._wrote = True, False
        return dict(told)

    def write(self, tensors: Sequence[Named]) -> Bodies:
        """Begin to send a bucket; what each engine is told of it.

        Raises:
            OSError: the bucket before did not reach everybody, or this one cannot be sent.
            ValueError: these tensors are no bucket.
        """
        self._settle()
        self._wrote = True
        flat: torch.Tensor | None = None
        if any(kind != _TENSOR_BY_TENSOR for kind in self._parties):
            flat = self._flatten(tensors)
        bodies: dict[str, Mapping[str, Any]] = {}
        about = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        for kind, party in self._parties.items():
            sent = [tensor.contiguous() for _, tensor in tensors]
            if flat is not None and kind != _TENSOR_BY_TENSOR:
                sent = [flat]
            joins = not party.joined
            self._sending.append(Doing(f"broadcast {party.name}", partial(party.send, sent)))
            for engine_id, group in party.told().items():
                bodies[engine_id] = {**about, "group": group, "join": joins}
        return bodies

    def close(self, *, whole: bool) -> None:
        """The update is over; one that was not whole takes the groups along. Idempotent.

        It may be said to be whole first, and not to be later: an engine that had all of it, and did not take it, has
        left its group.

        Raises:
            OSError: the last bucket did not reach everybody.
        """
        is_open, self._open = self._open, False
        if not whole:
            if self._wrote:
                self._forget()
        elif is_open:
            try:
                self._settle()
            except OSError:
                self._forget()
                raise

    def break_off(self) -> None:
        """Close every group that is sent to: whoever waits in one hears of it, here and there."""
        if self._wrote:
            for party in list(self._parties.values()):
                party.close()

    def release(self) -> None:
        """Leave all groups, and give up the buffer."""
        self._open = False
        self._forget()
        self._buffer = None

    def _settle(self) -> None:
        """Wait for what is being sent; raises OSError where it did not arrive."""
        sending, self._sending = self._sending, []
        for one in sending:
            one.result(2 * self._timeout_s)  # a join and a broadcast, each of which ends by itself

    def _forget(self) -> None:
        for party in self._parties.values():
            party.close()
        self._parties = {}
        if self._sending:
            self._sending = []
            self._buffer = None  # it may still be read

    def _flatten(self, tensors: Sequence[Named]) -> torch.Tensor:
        """The bucket in one tensor, in our buffer."""
        import torch  # noqa: PLC0415 - the trainer has it

        first = tensors[0][1]
        size = sum(tensor.nbytes for _, tensor in tensors)
        buffer = self._buffer
        if buffer is None or buffer.nbytes < size or buffer.device != first.device:
            room = -(-max(size, self._bucket_bytes) // ALIGNMENT) * ALIGNMENT
            self._buffer = buffer = torch.empty(room, dtype=torch.uint8, device=first.device)
            self.allocated += room
        bucket = FlattenedBucket.pack(tensors, "elements", into=buffer.view(first.dtype))
        return bucket.buffer[: bucket.used]


class _Party:
    """The engines of one kind, and the group with them.

    Attributes:
        engines: its other members.
        name: of the group.
        joined: whether the engines were told to join.
    """

    def __init__(self, kind: str, engines: tuple[Engine, ...], host: str, backend: Backend, timeout_s: float) -> None:
        self.engines = engines
        # vLLM is told no name; each group has a store of its own, so that two of one name are not in each other's way.
        self.name = kind if kind == _TENSOR_BY_TENSOR else f"rollout-svc-{kind}-{os.urandom(4).hex()}"
        self.joined = False
        self._kind = kind
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._size = 1 + sum(engine.ranks for engine in engines)
        self._meeting = Meeting(host, timeout_s)
        self._group: Collective | None = None
        self._closed = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether it can be sent to, or may be once it has been joined."""
        return not self._closed.is_set() and (not self.joined or (self._group is not None and not self._group.closed))

    def told(self) -> dict[str, dict[str, Any]]:
        """What each engine needs to join, and to know it by; from now on they are on their way."""
        more: dict[str, Any] = {}
        if self._kind == _TENSOR_BY_TENSOR and self._backend == "nccl" and not self.joined:
            made = unique_id((self._meeting.host, self._meeting.port), self.name, self._timeout_s)
            more["unique_id"] = base64.b64encode(made).decode()
        self.joined = True
        offset = 1
        told: dict[str, dict[str, Any]] = {}
        for engine in self.engines:
            told[engine.engine_id] = {
                "master_address": self._meeting.host,
                "master_port": self._meeting.port,
                "rank_offset": offset,
                "world_size": self._size,
                "group_name": self.name,
                "backend": self._backend,
                "timeout_s": self._timeout_s,
                **more,
            }
            offset += engine.ranks
        return told

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Join where that is to be done, and broadcast; raises CollectiveError."""
        try:
            self._joined(tensors[0].device).broadcast(tensors)
        except CollectiveError:
            self.close()  # whoever waits for what will not come hears of it
            raise

    def close(self) -> None:
        """Leave; idempotent."""
        self._closed.set()
        self._meeting.close()
        if self._group is not None:
            self._group.close()

    def _joined(self, device: torch.device) -> Collective:
        if self._closed.is_set():
            raise CollectiveError(f"group {self.name} is closed")
        if self._group is None:
            address = (self._meeting.host, self._meeting.port)
            self._group = Collective(self._backend, address, 0, self._size, self.name, self._timeout_s)
            if self._closed.is_set():
                self._group.close()
            if self._kind == _TENSOR_BY_TENSOR:
                self._group.warm_up(device)
        return self._group
