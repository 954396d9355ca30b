"""What a publisher needs of a way to hand weights over.

Invariants:

- One update at a time: `open`, then `write` for each bucket, then `close`, whatever happened.
- `write` is called only once every engine has loaded what was written before: memory may be written over.
- All methods block and are called in a thread, one at a time; but for `break_off`, which comes between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from rollout_svc.engines.updates.protocol import Way

if TYPE_CHECKING:
    import torch

__all__ = ["Bodies", "Engine", "Named", "Reissuing", "Sender"]

Named = tuple[str, "torch.Tensor"]
Bodies = dict[str, Mapping[str, Any]]
"""What each engine is told, by its id: JSON."""


class Engine(NamedTuple):
    """Who will be told.

    Attributes:
        engine_id: the service's name for it.
        dialect: what it speaks.
        ranks: tensor-parallel ranks.
        since: when it came into traffic, by the service's clock: another time, another process, maybe.
    """

    engine_id: str
    dialect: str
    ranks: int
    since: float = 0.0


class Sender(Protocol):
    """Hands weights over; every method raises ValueError or OSError where it cannot.

    Attributes:
        way: which one it is.
        allocated: bytes of buffers that were ever made.
        one_dtype: buckets have to be of one dtype each, for the engines of this update; known after `open`.
    """

    way: Way
    allocated: int
    one_dtype: bool

    def open(self, engines: Sequence[Engine]) -> Bodies:
        """Begin an update of these engines; what each is told at its opening."""

    def write(self, tensors: Sequence[Named]) -> Bodies:
        """Have a bucket ready; what each engine is told of it."""

    def close(self, *, whole: bool) -> None:
        """The update is over; `whole`: every engine has all of it. Idempotent; whole may turn out not to be."""

    def break_off(self) -> None:
        """Have what blocks in `write` end soon, with an error; called from another thread, at any time; idempotent."""

    def release(self) -> None:
        """Give up what is kept from one update to the next; idempotent."""


@runtime_checkable
class Reissuing(Protocol):
    """A sender whose buckets come with an event, and can come without."""

    def without_event(self, why: str) -> Bodies:
        """What engines are told of the bucket that was written last, without an event; none comes from now on.

        Args:
            why: which engine could not do with it, and what it said.

        Raises:
            ValueError: no bucket was written, or none that came with an event.
        """
