"""One owner for every heavy tensor, and the account of all that are alive.

Invariants:

- A handle ends exactly once: its payload is taken over by somebody, or it is released and the payload freed. Of any
  number of threads that try, one does it.
- What ended is not read: the error names who ended it.
- `Handles.live` counts those that have not ended, by kind, in handles and bytes, and nothing else.
- A handle that the collector finds before it ended is freed and counted as `lost`: its owner has forgotten it.
- A handle is never pickled: a copy of it would be a second owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import RLock
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rollout_svc.errors import SpentHandle
from rollout_svc.tensors.store import Stored

__all__ = ["Handle", "Handles", "LiveHandle", "Tally"]


class Tally(NamedTuple):
    """Handles of one kind that are alive: how many, and the bytes they own."""

    handles: int
    bytes: int


class LiveHandle(NamedTuple):
    """One handle that is alive, for those who look for its owner."""

    kind: str
    bytes: int
    holder: str


class Handle:
    """The one owner of a payload; see the module's invariants. Made by `Handles.hold`."""

    __slots__ = ("__weakref__", "_ended_by", "_handles", "_stored", "holder", "kind", "nbytes")

    def __init__(self, handles: Handles, stored: Stored, kind: str, holder: str) -> None:
        self.kind = kind
        self.holder = holder
        self.nbytes = stored.nbytes
        self._handles = handles
        self._stored: Stored | None = stored
        self._ended_by = ""

    def __repr__(self) -> str:
        state = f"ended by {self._ended_by}" if self._stored is None else f"held by {self.holder}"
        return f"<Handle {self.kind} {self.nbytes} bytes, {state}>"

    @property
    def alive(self) -> bool:
        """Whether it still owns its payload."""
        return self._stored is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, which is not looked at for it.

        Raises:
            SpentHandle: it was taken or released; says by whom.
        """
        return self._payload("asked for its shape").shape

    def read(self) -> np.ndarray[Any, Any]:
        """The tensor, read-only, where it lies; it may be used as long as the caller holds it, also after the end.

        Raises:
            SpentHandle: it was taken or released; says by whom.
        """
        stored = self._payload("read")
        try:
            return stored.view()
        except ValueError:
            self._payload("read")  # another thread freed it in between: then who did is told
            raise

    def take(self, by: str) -> Stored:
        """Take the payload over: from now on the caller has to free it. Exactly once.

        Args:
            by: who takes it.

        Raises:
            SpentHandle: it was taken or released before; says by whom.
        """
        with self._handles.lock:
            stored = self._payload(f"taken by {by}")
            self._end(f"{by}, who took it")
        return stored

    def release(self, by: str) -> bool:
        """Free the payload; idempotent. Returns whether this call did it.

        Args:
            by: who releases it, and why.
        """
        with self._handles.lock:
            stored = self._stored
            if stored is None:
                return False
            self._end(f"{by}, who released it")
        stored.free()
        return True

    def _payload(self, wanted: str) -> Stored:
        stored = self._stored
        if stored is None:
            raise SpentHandle(f"a handle of {self.nbytes} bytes ({self.kind}) was {wanted} after {self._ended_by}")
        return stored

    def _end(self, by: str) -> None:
        self._stored = None
        self._ended_by = by
        self._handles.ended(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it would have two owners; hand over what `take` returns")

    def __del__(self) -> None:
        if getattr(self, "_stored", None) is not None:
            self._handles.lost[self.kind] += 1
            self.release("nobody: it was forgotten by its holder")


class Handles:
    """The account of live handles.

    Attributes:
        debug: whether `listed` names each of them.
        made: how many there ever were, by kind.
        lost: how many of those nobody had ended when they were collected.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.debug = debug
        self.made: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.lock = RLock()  # also held by a collector's `__del__`, in whatever thread runs then
        self._live: dict[str, Tally] = {}
        self._listed: dict[int, LiveHandle] = {}

    def __repr__(self) -> str:
        return f"<Handles {self.live}>"

    def hold(self, stored: Stored, *, kind: str, holder: str) -> Handle:
        """Make the owner of a payload.

        Args:
            stored: the payload, which nobody else frees from now on.
            kind: what it is, for the account (`experts`, `shard`, …).
            holder: who has it, for people (a sample's id, …).
        """
        handle = Handle(self, stored, kind, holder)
        with self.lock:
            self._count(kind, 1, handle.nbytes)
            self.made[kind] += 1
            if self.debug:
                self._listed[id(handle)] = LiveHandle(kind, handle.nbytes, holder)
        return handle

    @property
    def live(self) -> dict[str, Tally]:
        """Those that are alive, by kind; a kind of which none is left has no key."""
        with self.lock:
            return dict(self._live)

    def listed(self) -> list[LiveHandle]:
        """Each handle that is alive, oldest first; empty unless `debug`."""
        with self.lock:
            return list(self._listed.values())

    def __iter__(self) -> Iterator[LiveHandle]:
        return iter(self.listed())

    def ended(self, handle: Handle) -> None:
        """Take note of an end; called by the handle alone, with the lock held."""
        self._count(handle.kind, -1, -handle.nbytes)
        self._listed.pop(id(handle), None)

    def _count(self, kind: str, handles: int, size: int) -> None:
        before = self._live.get(kind, Tally(0, 0))
        after = Tally(before.handles + handles, before.bytes + size)
        if after.handles:
            self._live[kind] = after
        else:
            del self._live[kind]
