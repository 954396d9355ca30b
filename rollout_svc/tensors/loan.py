"""What a trainer reads of a batch's heavy tensors: as long as the batch is lent to it, and no longer.

Invariants:

- The buffer owns what is read; whoever reads releases nothing.
- A loan ends once: whatever reads afterwards is told what ended it, also where the tensor is still there for the next.
- What was read before stays what it is, for as long as somebody holds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout_svc.errors import SpentHandle
from rollout_svc.heavy import Heavy

__all__ = ["Loan", "ReadHandle"]


class Loan:
    """Whether a batch is still lent; shared by all who read of it."""

    __slots__ = ("_ended_by",)

    def __init__(self) -> None:
        self._ended_by: str | None = None

    def __repr__(self) -> str:
        return f"<Loan {'in force' if self._ended_by is None else f'ended by {self._ended_by}'}>"

    @property
    def ended_by(self) -> str | None:
        """What ended it; None: it is in force."""
        return self._ended_by

    def end(self, by: str) -> None:
        """End it; only the first end counts."""
        self._ended_by = self._ended_by or by


class ReadHandle:
    """One sample's routed experts: to be read, not to be taken or released."""

    __slots__ = ("_heavy", "_loan", "name")

    def __init__(self, name: str, heavy: Heavy, loan: Loan) -> None:
        """Make a handle.

        Args:
            name: of the sample they are of.
            heavy: its owner's handle.
            loan: how long it may be read.
        """
        self.name = name
        self._heavy = heavy
        self._loan = loan

    def __repr__(self) -> str:
        return f"<ReadHandle {self.name} {self.nbytes} bytes, {self._loan}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._heavy.nbytes

    def read(self) -> np.ndarray[Any, Any]:
        """The tensor, read-only, where it lies; from any thread. It may be used as long as the caller holds it.

        Raises:
            SpentHandle: the loan has ended; says by what.
        """
        self._check()
        try:
            tensor: np.ndarray[Any, Any] = self._heavy.read()
        except SpentHandle:
            self._check()  # it ended meanwhile, in the thread of the service
            raise
        return tensor

    def _check(self) -> None:
        if self._loan.ended_by is not None:
            raise SpentHandle(f"routed experts of {self.name} were read after {self._loan.ended_by}")
