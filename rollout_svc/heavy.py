"""What is too big to be copied, as far as those know it who only carry it.

Invariant: whoever holds one releases it, once it is done with; who only reads it does not.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Heavy"]


class Heavy(Protocol):
    """A tensor that somebody owns; `rollout_svc.tensors.Handle` is one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; not for one that was given up."""

    def read(self) -> Any:
        """The tensor, to be read and not kept: a NumPy array that cannot be written to."""

    def release(self, by: str) -> bool:
        """Give it up, and say who does; idempotent. Returns whether this call did it."""
