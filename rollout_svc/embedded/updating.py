"""An update of the weights in buckets: staged beside the model, and swapped in at once.

Invariants:
- The model is as it was until `finish` swaps, which takes no time and copies nothing; whatever fails before has changed
  nothing, and `abandon` forgets it.
- A finished update has every tensor of the model, of its shape and dtype; what is missing is named.
- The tensors that were swapped out are what the next update is staged in: the second one allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from rollout_svc.copying import copy_all
from rollout_svc.embedded.model import WeightsError
from rollout_svc.embedded.receiving import BucketError, Receiver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rollout_svc.embedded.model import TinyTransformer

SHOWN: Final = 5
"""Names that an error lists; the rest are counted."""


class Updating:
    """Updates of one model, one after the other. Used by one thread at a time.

    Attributes:
        open: Whether one was begun, and neither finished nor abandoned.
        allocated: Bytes of staging that were ever allocated.
    """

    def __init__(self, model: TinyTransformer, receiver: Receiver | None = None) -> None:
        self.open = False
        self.allocated = 0
        self._wanted = dict(model.named_parameters())
        self._receiver = receiver or Receiver()
        self._spare: dict[str, Tensor] = {}
        self._loaded: set[str] = set()
        self._finite = False

    def begin(self, manifest: Any, *, finite: bool) -> None:
        """Begin an update; one that was under way is forgotten.

        Args:
            manifest: Of each tensor that will come `{"name", "shape", "dtype"}`; None: not known yet.
            finite: Refuse tensors with NaN or infinity.

        Raises:
            WeightsError: What will come does not fit the model; nothing was begun.
        """
        if self.open:
            self.abandon()
        if manifest is not None:
            self._check(manifest)
        self.open, self._finite = True, finite

    def receive(self, call: Mapping[str, Any]) -> int:
        """Stage a bucket, and return how many tensors it had.

        Raises:
            BucketError: It cannot be loaded as it was meant, or no update is open.
            WeightsError: A tensor does not fit the model, or is not finite where that was asked for.
        """
        if not self.open:
            raise BucketError("no update was begun here")
        return self._receiver.receive(call, self._stage)

    def finish(self) -> None:
        """Swap what was staged in; called where nothing computes with the model.

        Raises:
            WeightsError: Tensors are missing; the model is as it was.
            BucketError: No update is open.
        """
        if not self.open:
            raise BucketError("no update was begun here")
        missing = sorted(self._wanted.keys() - self._loaded)
        if missing:
            raise WeightsError(f"missing {listed(missing)}")
        for name, parameter in self._wanted.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data
        self.open = False
        self._loaded = set()
        self._receiver.end()

    def abandon(self) -> None:
        """Forget what was staged. Idempotent."""
        self.open = False
        self._loaded = set()
        self._receiver.drop()

    def give_up(self) -> None:
        """Forget what was staged, and free what it was staged in. Idempotent."""
        self.abandon()
        self._spare = {}

    def _check(self, manifest: Any) -> None:
        if not isinstance(manifest, list):
            raise WeightsError(f"the manifest has to be a list, not {type(manifest).__name__}")
        try:
            coming = {entry["name"]: (tuple(entry["shape"]), entry["dtype"]) for entry in manifest}
        except (KeyError, TypeError) as error:
            raise WeightsError(f"the manifest has an entry without name, shape and dtype: {error!r}") from error
        wanted = {name: _kind(parameter) for name, parameter in self._wanted.items()}
        problems = []
        if unknown := sorted(coming.keys() - wanted.keys()):
            problems.append(f"unknown {listed(unknown)}")
        if missing := sorted(wanted.keys() - coming.keys()):
            problems.append(f"missing {listed(missing)}")
        other = [name for name, kind in wanted.items() if name in coming and coming[name] != kind]
        if other:
            told = [f"{name}: {_told(coming[name])} in place of {_told(wanted[name])}" for name in other]
            problems.append(listed(told))
        if problems:
            raise WeightsError("; ".join(problems))

    def _stage(self, views: list[tuple[str, Tensor]]) -> None:
        copy_all([(self._place(name, view), view) for name, view in views])
        self._loaded.update(name for name, _ in views)

    def _place(self, name: str, view: Tensor) -> Tensor:
        """Where a tensor is staged; raises WeightsError for one that may not be."""
        parameter = self._wanted.get(name)
        if parameter is None:
            raise WeightsError(f"unknown {name}")
        if _kind(view) != _kind(parameter):
            raise WeightsError(f"{name}: {_told(_kind(view))} in place of {_told(_kind(parameter))}")
        if self._finite and not bool(torch.isfinite(view).all()):
            raise WeightsError(f"{name} has values that are not finite")
        spare = self._spare.get(name)
        if spare is None:
            spare = self._spare[name] = torch.empty_like(parameter.data)
            self.allocated += spare.nbytes
        return spare


def listed(names: list[str]) -> str:
    """Name a few, and count the others."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _told(kind: tuple[Any, Any]) -> str:
    return f"{kind[1]} {list(kind[0])}"
