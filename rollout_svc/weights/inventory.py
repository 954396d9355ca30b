"""What a publisher has sent in an update, beside what it sent in the last whole one.

Invariants:

- An update with less than the last whole one has no end, and a tensor of another shape is never sent: engines that
  load as it comes take either without a word, or half of a layer.
- More than the last one had is no difference: an engine that has no such tensor says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rollout_svc.weights.names import Kind, differences, listed

if TYPE_CHECKING:
    from rollout_svc.weights.senders.protocol import Named

__all__ = ["Inventory"]


class Inventory:
    """Counts what is sent; see the module's invariants.

    Attributes:
        sent: what was counted.
        whole: whether all of it was, and nothing was missing.
    """

    def __init__(self, known: Mapping[str, Kind] | None) -> None:
        """Begin an update.

        Args:
            known: what the last whole one had; None: nothing to compare with.
        """
        self.sent: dict[str, Kind] = {}
        self.whole = False
        self._known = known

    def add(self, tensors: Iterable[Named]) -> None:
        """Count what is about to be sent; raises ValueError where one has another shape than it had."""
        coming = {name: Kind(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors}
        before = {name: kind for name, kind in (self._known or {}).items() if name in coming}
        self._refuse(differences({name: coming[name] for name in before}, before)[0])
        self.sent |= coming

    def end(self) -> None:
        """Nothing follows; raises ValueError where something did not come that came in the last whole update."""
        if self._known is not None:
            missing = [name for name in self._known if name not in self.sent]
            self._refuse([f"missing {listed(missing)}"] if missing else [])
        self.whole = True

    def _refuse(self, lines: list[str]) -> None:
        if lines:
            words = "the last whole update was another; pass `check_names=False` if that is meant"
            raise ValueError(f"{listed(lines)}: {words}")
