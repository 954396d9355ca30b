"""What passes between an update and one engine.

Invariants:

- One object for each engine and update: nothing is carried over to the next one.
- No I/O of its own: it is given a way to ask.
- `touched` is true from before the first call that may change the engine's weights until `close` has returned: an
  update that ends between leaves an engine that nobody may generate with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from rollout_svc.engines.calls import Call, Reply

__all__ = ["NO_EVENT", "WAYS", "Ask", "EngineUpdate", "Opening", "Reverting", "Way"]

NO_EVENT: Final = "no_event"
"""The kind of failure of an engine that may take the same bucket where no event comes with it."""

Way = Literal["shm", "cuda_ipc", "distributed"]
"""How weights get from a trainer into an engine, handed over by us; also the name of the engine's capability."""
WAYS: Final[tuple[Way, ...]] = get_args(Way)

Ask = Callable[[Call], Awaitable[Reply]]
"""Makes one control call at one engine, in bounded time; raises WorkerFailure where it is not answered."""


class Opening(NamedTuple):
    """What is known before the first bucket.

    Attributes:
        manifest: of each tensor that will come `{"name", "shape", "dtype"}`; None: not known yet.
        check_finite: NaN and infinity are to be refused, where the engine can.
        version: of the weights.
        own: what the publisher has for this engine alone, as the group it is to join.
    """

    manifest: list[Any] | None
    check_finite: bool
    version: int
    own: Mapping[str, Any]


class EngineUpdate(Protocol):
    """One engine's side of one update; every method raises WorkerFailure."""

    touched: bool

    async def open(self, ask: Ask, opening: Opening) -> None:
        """Say that weights will come."""

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have a bucket loaded; `body` is the publisher's, for this engine."""

    async def close(self, ask: Ask, version: int) -> None:
        """Nothing follows: they are its weights from now on, and labelled where it has labels."""

    async def abandon(self, ask: Ask) -> None:
        """The update is over, and has failed, here or elsewhere."""


@runtime_checkable
class Reverting(Protocol):
    """An engine's side of an update that can be taken back once it was closed; raises WorkerFailure."""

    async def revert(self, ask: Ask, version: int) -> None:
        """The weights before it are its weights again, labelled so where it has labels; nothing else came since."""
