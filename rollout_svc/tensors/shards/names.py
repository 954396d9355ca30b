"""What is known of a remote tensor everywhere: which it is, who has it, what it looks like. Some 200 bytes.

Invariants:

- Values: frozen, picklable, JSON-able, without a reference to any bytes of the tensor.
- An id is given out once, ever: it begins with what its owner drew at random when it started.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["Library", "Meta", "Shard"]

Library = Literal["torch", "numpy"]


class Shard(NamedTuple):
    """Where the bytes of a tensor are.

    Attributes:
        id: of the shard.
        owner: who has it: `http://host:port[/prefix]`, or `ray:[NAMESPACE/]ACTOR`.
        nbytes: bytes of the tensor.
    """

    id: str
    owner: str
    nbytes: int


class Meta(NamedTuple):
    """What a tensor looks like.

    Attributes:
        shape: its dimensions.
        dtype: its name without a prefix, as torch and NumPy spell it: `bfloat16`, `float32`, `int64`, `bool`, …
        library: whose tensor it is, and will be again.
    """

    shape: tuple[int, ...]
    dtype: str
    library: Library = "torch"

    @classmethod
    def of(cls, found: Any) -> Meta:
        """Read it back from decoded JSON."""
        shape, dtype, library = found
        return cls(tuple(int(size) for size in shape), str(dtype), "numpy" if library == "numpy" else "torch")
