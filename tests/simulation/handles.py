"""What has to hold of heavy tensors in every history: P27 and P28.

Invariant: whatever is alive is owned by a sample that is not settled, or is the result of work that nobody has taken
over yet; nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rollout_svc.tensors import Tally
from rollout_svc.workers.experts import KIND

if TYPE_CHECKING:
    from rollout_svc.group import Group
    from tests.simulation.life import Life

__all__ = ["HandleWatch"]


class HandleWatch:
    """The checks on one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world

    def check(self, groups: Iterable[Group]) -> None:
        """What is alive is what is owned; `groups`: those of training that the service holds."""
        parts, require = self._life.parts, self._world.require
        owned: list[Any] = [s.experts for group in groups for s in group.samples if s.experts is not None]
        guests = [s for e in parts.evaluations._open.values() for g in e.groups for s in g.samples if s.experts]
        require(not guests, "P28", f"evaluations have routed experts: {guests}")
        results = (future for future in parts.experts.results if future.done() and not future.cancelled())
        owned += [future.result() for future in results if future._exception is None]
        owned += [made for made in self._life.threads.made.values() if not isinstance(made, Exception)]
        owned = [handle for handle in owned if handle is not None]
        dead = [handle for handle in owned if not handle.alive]
        require(not dead, "P27", f"somebody owns what was released: {dead}")
        found = Tally(len(owned), sum(handle.nbytes for handle in owned))
        live = parts.handles.live.get(KIND, Tally(0, 0))
        require(live == found, "P27", f"alive are {live}, owned {found}")
        require(not parts.handles.lost, "P27", f"nobody released {parts.handles.lost}")

    def check_ended(self) -> None:
        """The service has stopped: nothing is alive, and nothing was forgotten."""
        handles = self._life.parts.handles
        self._world.require(not handles.live, "P27", f"after the stop {handles.live} are alive")
        self._world.require(not handles.lost, "P27", f"nobody released {handles.lost}")
