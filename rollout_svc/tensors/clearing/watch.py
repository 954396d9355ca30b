"""What processes say they hold after a drain, and whether that is a leak. Pure.

A process names a few of the tensors it holds, the one that was not used for the longest time in front: what leaked is
not used any more, so it gets there.

Invariants:

- What belongs to a live batch is no leak, and neither is what a process is known to owe and will be asked for again.
- Anything else in a fetch buffer is a leak at once. At an owner it is one if it was to be dropped just now, or if it
  was there at the look before already: a batch may be made there that nobody has been told of yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

__all__ = ["Account", "Figures", "Leak", "Watch", "read_figures"]


class Account(NamedTuple):
    """What a process holds: tensors, bytes, and the ids of a few, the longest unused in front."""

    entries: int = 0
    bytes: int = 0
    ids: tuple[str, ...] = ()


class Figures(NamedTuple):
    """What one process says of itself.

    Attributes:
        process: its address.
        parts: ranks it has, `actor[0,1]`, and `owner` where it owns shards.
        incarnation: which of the processes at that address; None: it did not say.
        cached: in its fetch buffer.
        owned: of its own shards.
        expired: shards of its own that went because their lease had ended, since it started.
    """

    process: str
    parts: tuple[str, ...]
    incarnation: str | None
    cached: Account
    owned: Account
    expired: int = 0


class Leak(NamedTuple):
    """Tensors that a process holds and that belong to no live batch.

    Attributes:
        process: its address.
        parts: its ranks.
        where: `buffer` or `owner`.
        entries: tensors it holds there, live ones included.
        bytes: of those.
        ids: of a few that are left over.
    """

    process: str
    parts: tuple[str, ...]
    where: str
    entries: int
    bytes: int
    ids: tuple[str, ...]


def read_figures(process: str, parts: tuple[str, ...], found: Mapping[str, Any]) -> Figures:
    """Read what a process answered.

    Raises:
        ValueError, TypeError, KeyError: it is not what a data plane answers.
    """
    owner, buffer = found.get("owner"), found.get("buffer")
    incarnation = found.get("incarnation")
    return Figures(
        process,
        (*parts, "owner") if owner else parts,
        None if incarnation is None else str(incarnation),
        _account(buffer),
        _account(owner),
        int(owner.get("expired", 0)) if owner else 0,
    )


def _account(found: Mapping[str, Any] | None) -> Account:
    if not found:
        return Account()
    return Account(int(found["entries"]), int(found["bytes"]), tuple(map(str, found.get("ids", ()))))


class Watch:
    """Remembers what it saw at owners, for one look."""

    def __init__(self) -> None:
        self._seen: dict[str, frozenset[str]] = {}
        self._expired: dict[tuple[str, str | None], int] = {}

    def look(
        self,
        figures: Collection[Figures],
        *,
        live: Collection[str],
        dropped: Collection[str] | None,
        owed: Mapping[str, Collection[str]],
    ) -> tuple[Leak, ...]:
        """Judge what the processes hold after a clear.

        Args:
            figures: of those that answered.
            live: ids of the batches that are not cleared yet.
            dropped: ids that owners were to drop just now; None: they were to drop nothing, and are not looked at.
            owed: by process, the ids it will be asked for once more.
        """
        leaks: list[Leak] = []
        seen: dict[str, frozenset[str]] = {}

        def add(one: Figures, where: str, account: Account, left: list[str]) -> None:
            if left:
                leaks.append(Leak(one.process, one.parts, where, account.entries, account.bytes, tuple(left)))

        for one in figures:
            kept = owed.get(one.process, ())
            add(one, "buffer", one.cached, [name for name in one.cached.ids if name not in live and name not in kept])
            if dropped is not None:
                left = [name for name in one.owned.ids if name not in live and name not in kept]
                before = self._seen.get(one.process, frozenset())
                seen[one.process] = frozenset(left)
                add(one, "owner", one.owned, [name for name in left if name in before or name in dropped])
        if dropped is not None:
            self._seen = seen
        return tuple(leaks)

    def expired(self, figures: Collection[Figures]) -> dict[str, int]:
        """Return, by process, how many leases ended there since the look before: ids that nobody cleared."""
        now = {(one.process, one.incarnation): one.expired for one in figures}
        more = {key[0]: count - self._expired.get(key, 0) for key, count in now.items()}
        self._expired = now
        return {process: count for process, count in more.items() if count > 0}
