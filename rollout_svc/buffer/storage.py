"""The storage port: where groups, leases and the sources' positions are made durable.

Invariants:

- What is noted is written in the order it was noted, and what one call notes is written together or not at all: after
  a crash the storage holds a prefix of the notes.
- Noting never waits and never fails: a storage that cannot write fails the next `flush`, and every one after it.
- `save` and `flush` return once what was noted before would survive what the storage promises to survive. A group that
  is being saved counts as in flight, so that a pause sees a put that is under way.
- A group is known by its id; a note about it replaces what was known of what it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rollout_svc.buffer.recovered import Position, Recovered

if TYPE_CHECKING:
    from rollout_svc.buffer.replay import Lease
    from rollout_svc.group import Group
    from rollout_svc.sample import Sample
    from rollout_svc.segment import Segment

__all__ = ["MemoryStorage", "Position", "Storage"]


class Storage(Protocol):
    """Makes durable what must survive."""

    def recover(self) -> Recovered:
        """What an earlier life left; asked once, before anything is noted."""

    # -- prompts ---------------------------------------------------------------------------------------------

    def pushed(self, task: str, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Lines were pushed to a task, all new: content by prompt id, in order."""

    def admitted(self, group: Group, position: Position | None) -> None:
        """A prompt became a group, and its source moved on to `position`; None: it came from the tail, not a source."""

    # -- work ------------------------------------------------------------------------------------------------

    def kept(self, sample: Sample, more: Segment | None = None) -> None:
        """A sample ended an attempt, or has more tokens: what it has now, and `more`, is to survive."""

    def handed_back(self, group: Group) -> None:
        """A group came back unfinished: what its members have now is to survive."""

    async def save(self, group: Group) -> None:
        """Every member is COMPLETED: record the group as ready, durably."""

    def settled(self, group: Group, *, again: bool = False) -> None:
        """A group was filtered, failed or expired; `again`: its prompt waits to be admitted once more."""

    # -- trainers --------------------------------------------------------------------------------------------

    def leased(self, lease: Lease) -> None:
        """A batch was lent."""

    def unleased(self, lease: Lease) -> None:
        """A lease ended without an ack; its groups are ready again."""

    def consumed(self, lease: Lease) -> None:
        """A batch was acknowledged: its groups are consumed for good."""

    def versioned(self, version: int, path: str | None = None) -> None:
        """The fleet has other weights; `path`: where they can be loaded from again."""

    # -- life ------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return once everything noted so far is durable; raises what the storage failed with."""

    async def close(self) -> None:
        """Write what is left and close; idempotent."""


class MemoryStorage:
    """Nothing survives the process: the objects themselves are the record."""

    def recover(self) -> Recovered:
        """Nothing."""
        return Recovered()

    def pushed(self, task: str, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Promise nothing."""

    def admitted(self, group: Group, position: Position | None) -> None:
        """Promise nothing."""

    def kept(self, sample: Sample, more: Segment | None = None) -> None:
        """Promise nothing."""

    def handed_back(self, group: Group) -> None:
        """Promise nothing."""

    async def save(self, group: Group) -> None:
        """Promise nothing, at once."""

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Promise nothing."""

    def leased(self, lease: Lease) -> None:
        """Promise nothing."""

    def unleased(self, lease: Lease) -> None:
        """Promise nothing."""

    def consumed(self, lease: Lease) -> None:
        """Promise nothing."""

    def versioned(self, version: int, path: str | None = None) -> None:
        """Promise nothing."""

    async def flush(self) -> None:
        """Promise nothing, at once."""

    async def close(self) -> None:
        """Do nothing."""
