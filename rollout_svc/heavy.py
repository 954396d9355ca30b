"""What is too big to be copied, as far as those know it who only carry it.

Invariant: whoever holds one releases it, once it is done with; who only reads it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["FirstRows", "Heavy"]


class Heavy(Protocol):
    """A tensor that somebody owns; `rollout_svc.tensors.Handle` is one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; not for one that was given up."""

    def read(self) -> Any:
        """The tensor, to be read and not kept: a NumPy array that cannot be written to. May block."""

    def later(self) -> Callable[[], Any]:
        """What reads the tensor, in another thread, also after it was given up here. Blocks nowhere."""

    def release(self, by: str) -> bool:
        """Give it up, and say who does; idempotent. Returns whether this call did it."""


class FirstRows:
    """The first rows of a heavy tensor, which this owns from now on: all of it is in memory until this is released."""

    __slots__ = ("__weakref__", "_rows", "_whole")

    def __init__(self, whole: Heavy, rows: int) -> None:
        self._whole = whole
        self._rows = rows

    def __repr__(self) -> str:
        return f"<FirstRows {self._rows} of {self._whole!r}>"

    @property
    def nbytes(self) -> int:
        """Bytes that are held, those of the other rows included."""
        return self._whole.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; not for one that was given up."""
        return (self._rows, *self._whole.shape[1:])

    def read(self) -> Any:
        """The rows, to be read and not kept. May block."""
        return self._whole.read()[: self._rows]

    def later(self) -> Callable[[], Any]:
        """What reads the rows, in another thread, also after they were given up here. Blocks nowhere."""
        read, rows = self._whole.later(), self._rows
        return lambda: read()[:rows]

    def release(self, by: str) -> bool:
        """Give it up, and say who does; idempotent. Returns whether this call did it."""
        return self._whole.release(by)
