"""What a trainer holds of a service on Ray: the method names of `RolloutClient`, each with `.remote()`.

Invariants:

- `remote` returns Ray's own reference, to be awaited or given to `ray.get`; it never waits for the service.
- A call that the service refuses raises its error where the reference is looked at: of the class that the service
  raised, with its attributes, and Ray's RayTaskError as well, whose text quotes the traceback. `error.cause` is the
  error alone.
- While Ray starts the actor again a call fails with `ray.exceptions.ActorUnavailableError`: it may have taken effect.
  The handle is good for the next life. An actor that is over fails it with `ActorDiedError`.
- A batch that arrived in this process is acknowledged with this handle's next take, unless it is told not to.
- A handle that was pickled, into a task or another actor, is another handle: it acknowledges what arrives there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from rollout_svc.ray.acks import Acks

__all__ = ["CALLS", "RolloutHandle"]

Ack = Literal["auto"] | list[str] | tuple[str, ...] | None

CALLS: Final = (
    *("ready", "status", "stuck", "memory", "pause", "resume", "take_batch", "ack", "put_prompts", "checkpoint"),
    *("evaluate", "update_weights", "concurrency", "set_concurrency", "workers", "add_worker", "remove_worker"),
    *("stop", "touched"),
)
"""What can be called; those but the last two are `RolloutClient`'s."""


class _Call:
    """One method; `remote` returns Ray's reference to what it returns."""

    __slots__ = ("_method",)

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; raises TypeError for arguments that it does not have."""
        return self._method.remote(*args, **kwargs)


class _Take(_Call):
    """`take_batch`, which brings the acknowledgement of the batch before."""

    __slots__ = ("_acks",)

    def __init__(self, method: Any, acks: Acks) -> None:
        super().__init__(method)
        self._acks = acks

    def remote(
        self, step: int, groups: int, timeout_s: float = 60.0, ack: Ack = "auto", *, tensors: bool = False
    ) -> Any:
        """Lease a batch of finished groups.

        Args:
            step: trainer steps done so far; the same step again, while leased, gives the same batch.
            groups: how many groups.
            timeout_s: how long the service may wait for them.
            ack: `auto` acknowledges the batches that arrived here for other steps; a list, exactly those; None,
                nothing: acknowledging that batch is then the caller's.
            tensors: as padded torch tensors, as `RolloutClient.take_batch` gives them.
        """
        acked = self._acks.beside(step) if ack == "auto" else _named(ack)
        self._acks.sent(acked if isinstance(acked, list) else ())
        client = None if ack is None else self._acks.client
        return self._method.remote(step, groups, timeout_s, acked, tensors=tensors, client=client)


class _Ack(_Call):
    """`ack`, which ends what is read of the batch."""

    __slots__ = ("_acks",)

    def __init__(self, method: Any, acks: Acks) -> None:
        super().__init__(method)
        self._acks = acks

    def remote(self, batch_id: str) -> Any:
        """Acknowledge a batch: its groups are consumed for good."""
        self._acks.sent([batch_id])
        return self._method.remote(batch_id)


class _Checkpoint(_Call):
    """`checkpoint`, which brings the acknowledgement of the batches before."""

    __slots__ = ("_acks",)

    def __init__(self, method: Any, acks: Acks) -> None:
        super().__init__(method)
        self._acks = acks

    def remote(self, path: str, step: int, *, ack: Ack = "auto") -> Any:
        """Write a snapshot; `ack`: `auto` acknowledges the batches that arrived here for earlier steps."""
        acked = self._acks.before(step) if ack == "auto" else _named(ack)
        self._acks.sent(acked if isinstance(acked, list) else ())
        return self._method.remote(path, step, acked)


def _named(ack: Any) -> Any:
    """The batches that a caller names; what names none stays as it is, for the service to refuse."""
    if ack is None:
        return []
    named = isinstance(ack, Iterable) and not isinstance(ack, str | bytes | Mapping)
    return list(ack) if named else ack


_OWN: Final[dict[str, type[_Take | _Ack | _Checkpoint]]] = {
    "take_batch": _Take,
    "ack": _Ack,
    "checkpoint": _Checkpoint,
}


class RolloutHandle:
    """A service on Ray: `handle.pause.remote(...)` and so on; see `RolloutClient` for what each call takes."""

    def __init__(self, actor: Any) -> None:
        """Make one for an actor, as `start` and `connect` do."""
        self.actor = actor
        self._acks = Acks()

    def __repr__(self) -> str:
        return f"<RolloutHandle {self.actor!r} unacked={list(self.unacked)}>"

    @property
    def unacked(self) -> tuple[str, ...]:
        """The batches that arrived here and are not acknowledged, oldest first."""
        return self._acks.unacked

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(f"the service has no call {name!r}: {', '.join(CALLS)}")
        method, own = getattr(self.actor, name), _OWN.get(name)
        return _Call(method) if own is None else own(method, self._acks)

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutHandle, (self.actor,)
