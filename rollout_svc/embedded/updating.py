"""An update of the weights in buckets: staged beside the model, and swapped in at once.

Invariants:
- The model is as it was until `finish` swaps, which takes no time and copies nothing; whatever fails before has changed
  nothing, and `abandon` forgets it.
- A finished update has every tensor of the model once, of its shape and dtype; what is missing is named.
- An update that was begun under a name is carried on and ended under that name alone: of two senders the later one
  ends the other's. A call that is repeated, for its answer was lost, does nothing more.
- The tensors that were swapped out are what the next update is staged in: the second one allocates nothing.
- Until then `revert` swaps them in again: an update that failed elsewhere is taken back.
"""

from __future__ import annotations

from collections import Counter
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
        begun: How many ever were.
        allocated: Bytes of staging that were ever allocated.
        can_revert: Whether what was swapped out last is whole, and what was there before the weights of now.
    """

    def __init__(self, model: TinyTransformer, receiver: Receiver | None = None) -> None:
        self.open = False
        self.begun = 0
        self.allocated = 0
        self.can_revert = False
        self._wanted = dict(model.named_parameters())
        self._receiver = receiver or Receiver()
        self._reverted: str | None = None
        self._spare: dict[str, Tensor] = {}
        self._loaded: set[str] = set()
        self._finite = False
        self._update: str | None = None
        self._finished: str | None = None
        self._last: tuple[Mapping[str, Any], int] | None = None

    def begin(self, manifest: Any, *, finite: bool, update: str | None = None) -> None:
        """Begin an update; one that was under way is forgotten.

        Args:
            manifest: Of each tensor that will come `{"name", "shape", "dtype"}`; None: not known yet.
            finite: Refuse tensors with NaN or infinity.
            update: Its name, in all of its calls.

        Raises:
            WeightsError: What will come does not fit the model; nothing was begun.
        """
        if self.open:
            self.abandon()
        if manifest is not None:
            self._check(manifest)
        self.open, self._finite, self._update, self._finished = True, finite, update, None
        self.begun += 1
        self.can_revert = False

    def receive(self, call: Mapping[str, Any]) -> int:
        """Stage a bucket, and return how many tensors it had.

        Raises:
            BucketError: It cannot be loaded as it was meant, or no update of this name is open.
            WeightsError: A tensor does not fit the model, came before, or is not finite where that was asked for.
        """
        self._refuse_other(call.get("update"))
        if self._last is not None and self._last[0] == call:
            return self._last[1]
        self._last = None
        count = self._receiver.receive(call, self._stage)
        self._last = call, count
        return count

    def stage(self, tensors: list[tuple[str, Tensor]]) -> int:
        """Stage tensors that came in another way, and return how many they are; raises as `receive`."""
        self._refuse_other(None)
        self._stage(tensors)
        return len(tensors)

    def finish(self, update: str | None = None) -> bool:
        """Swap what was staged in; called where nothing computes with the model.

        Returns:
            False where this update was finished already.

        Raises:
            WeightsError: Tensors are missing; the model is as it was.
            BucketError: No update of this name is open.
        """
        if not self.open and update is not None and update == self._finished:
            return False
        self._refuse_other(update)
        missing = sorted(self._wanted.keys() - self._loaded)
        if missing:
            raise WeightsError(f"missing {listed(missing)}")
        self._swap()
        self._finished = update
        self.can_revert = True
        self._close()
        self._receiver.end()
        return True

    def revert(self, update: str | None = None) -> bool:
        """Swap what was swapped out in again; called where nothing computes with the model.

        Returns:
            False where this update was taken back already.

        Raises:
            BucketError: Another update was begun since, or none of this name was finished.
        """
        if update is not None and update == self._reverted:
            return False
        if not self.can_revert or update not in (None, self._finished):
            raise BucketError("there is no update to take back: another one came since, or none was finished")
        self._swap()
        self.can_revert, self._reverted = False, update
        return True

    def _swap(self) -> None:
        for name, parameter in self._wanted.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data

    def abandon(self, update: str | None = None) -> None:
        """Forget what was staged, unless it is of another update than the one that is named. Idempotent."""
        if update is None or update == self._update:
            self._close()
            self._receiver.drop()

    def _close(self) -> None:
        self.open, self._update, self._last = False, None, None
        self._loaded = set()

    def _refuse_other(self, update: Any) -> None:
        if not self.open:
            raise BucketError("no update was begun here")
        if update != self._update:
            raise BucketError("another update was begun here since")

    def give_up(self) -> None:
        """Forget what was staged, and free what it was staged in. Idempotent."""
        self.abandon()
        self._spare = {}

    def _check(self, manifest: Any) -> None:
        if not isinstance(manifest, list):
            raise WeightsError(f"the manifest has to be a list, not {type(manifest).__name__}")
        try:
            names = [entry["name"] for entry in manifest]
            coming = {entry["name"]: (tuple(entry["shape"]), entry["dtype"]) for entry in manifest}
        except (KeyError, TypeError) as error:
            raise WeightsError(f"the manifest has an entry without name, shape and dtype: {error!r}") from error
        if strange := [name for name in coming if not isinstance(name, str)]:
            raise WeightsError(f"the manifest has {strange[0]!r:.100} for a name: expected a string")
        wanted = {name: _kind(parameter) for name, parameter in self._wanted.items()}
        problems = []
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            problems.append(f"twice {listed(twice)}")
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
        counts = Counter(name for name, _ in views)
        if twice := [name for name, count in counts.items() if count > 1 or name in self._loaded]:
            raise WeightsError(f"{listed(twice)} came twice")
        copy_all([(self._place(name, view), view) for name, view in views])
        self._loaded.update(counts)

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
