"""Which batches a handle has received and not acknowledged.

Invariants:

- A batch counts as received where it was unpacked, in this process; one that nobody looked at is not acknowledged.
- It stays until a take that carried its acknowledgement has been answered: one that failed may be repeated as it is.
  What an `ack` or a checkpoint has acknowledged goes with the next take once more. Twice is the same as once.
- Taking a step again never acknowledges the batch of that step.
- What an acknowledgement was sent for is not read any more.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable
from typing import Final, Protocol
from weakref import WeakValueDictionary

__all__ = ["Acks", "acks_of"]


class Lent(Protocol):
    """A batch that was received, as long as somebody has it."""

    def end(self, by: str) -> None:
        """Its tensors are not to be read any more."""


class Acks:
    """Those of one handle; from any thread."""

    def __init__(self) -> None:
        self.client: Final = uuid.uuid4().hex
        self._unacked: dict[str, int] = {}
        self._lent: WeakValueDictionary[str, Lent] = WeakValueDictionary()
        self._lock = threading.Lock()
        _CLIENTS[self.client] = self

    def __repr__(self) -> str:
        return f"<Acks unacked={list(self._unacked)}>"

    @property
    def unacked(self) -> tuple[str, ...]:
        """The batches that were received and not acknowledged, oldest first."""
        with self._lock:
            return tuple(self._unacked)

    def received(self, batch_id: str, step: int, lent: Lent) -> None:
        """Take note of a batch; another of the same step is over, or that one would have come again."""
        with self._lock:
            for other in [one for one, of in self._unacked.items() if of == step and one != batch_id]:
                del self._unacked[other]
            self._unacked[batch_id] = step
            self._lent[batch_id] = lent

    def answered(self, acked: Iterable[str]) -> None:
        """Take note that the service has heard these acknowledgements."""
        with self._lock:
            for batch_id in acked:
                self._unacked.pop(batch_id, None)

    def beside(self, step: int) -> list[str]:
        """What a take of this step acknowledges: whatever was received for another."""
        with self._lock:
            return [batch_id for batch_id, of in self._unacked.items() if of != step]

    def before(self, step: int) -> list[str]:
        """What a checkpoint of this step acknowledges: whatever was received for an earlier one."""
        with self._lock:
            return [batch_id for batch_id, of in self._unacked.items() if of < step]

    def sent(self, acked: Iterable[str]) -> None:
        """Their acknowledgement is on its way: end what is read of them."""
        for batch_id in acked:
            with self._lock:
                lent = self._lent.pop(batch_id, None)
            if lent is not None:
                lent.end(f"the ack of batch {batch_id}")


_CLIENTS: WeakValueDictionary[str, Acks] = WeakValueDictionary()


def acks_of(client: str | None) -> Acks | None:
    """The handle of this process with that name, if it is one of this process."""
    return None if client is None else _CLIENTS.get(client)
