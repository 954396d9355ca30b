"""What is known of a remote tensor everywhere: which it is, who has it, what it looks like. Some 200 bytes.

Invariants:

- Values: frozen, picklable, JSON-able, without a reference to any bytes of the tensor.
- An id is given out once, ever: it begins with what its owner drew at random when it started.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

__all__ = ["Library", "Meta", "Shard", "check_address"]

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
        """Read it back from decoded JSON; raises ValueError or TypeError for what is none."""
        shape, dtype, library = found
        if library not in get_args(Library):
            raise ValueError(f"library: expected one of {', '.join(get_args(Library))}, not {library!r:.100}")
        return cls(tuple(int(size) for size in shape), str(dtype), library)


def check_address(address: object) -> None:
    """Raise ValueError for what is no address of a process with shards: `http://host:port[/prefix]`, `ray:ACTOR`."""
    if not (isinstance(address, str) and (_is_actor(address) or _is_plane(address))):
        raise ValueError(f"expected http://host:port[/prefix] or ray:[NAMESPACE/]ACTOR, not {address!r:.200}")


def _is_actor(address: str) -> bool:
    return address.startswith("ray:") and bool(address.removeprefix("ray:").rpartition("/")[2])


def _is_plane(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False
