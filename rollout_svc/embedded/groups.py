"""Groups in which a trainer broadcasts weights, and what is received there: the built-in engine's side.

Invariants:
- Whatever blocks runs in a thread that nobody has to wait for: neither the loop nor the end of the process.
- What can be read of a call is received before anything of it is refused: the others in the group are not held up.
- The buffer that is received into is kept for the next bucket.
- At most `MAX_GROUPS` are kept: a trainer that went without leaving does not leave its groups here for good.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from rollout_svc.collective import Collective, CollectiveError, Doing
from rollout_svc.embedded.receiving import BucketError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

MAX_GROUPS: Final = 4
"""Trainers, old and new, that an engine may be in a group with."""
TIMEOUT_S: Final = 60.0
"""For a join and for a bucket, where the trainer names none."""
MAX_TIMEOUT_S: Final = 3600.0
"""Most that it may name."""


class Received(NamedTuple):
    """A bucket that came: its tensors, views of a buffer to be given back."""

    tensors: list[tuple[str, torch.Tensor]]
    buffer: torch.Tensor


class Groups:
    """The groups of one engine. Its methods block, and are called in threads."""

    def __init__(self) -> None:
        self._groups: dict[str, Collective] = {}
        self._joining: set[str] = set()
        self._spare: torch.Tensor | None = None
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those it is in, the oldest first."""
        return tuple(self._groups)

    def join(self, call: Mapping[str, Any]) -> None:
        """Join the group that a call describes; its rank is `rank_offset`.

        Raises:
            BucketError: it cannot be joined.
        """
        name, host, backend = (_text(call, key) for key in ("group_name", "master_address", "backend"))
        port, rank, size = (_whole(call, key) for key in ("master_port", "rank_offset", "world_size"))
        timeout_s = call.get("timeout_s", TIMEOUT_S)
        if backend != "gloo":
            raise BucketError(f"backend: this engine computes on the CPU and needs 'gloo', not {backend!r:.100}")
        if not 0 < rank < size:
            raise BucketError(f"rank_offset: expected 1 to {size - 1}, not {rank}")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise BucketError(f"timeout_s: expected more than 0, at most {MAX_TIMEOUT_S:g}, not {timeout_s!r:.100}")
        if name in self._groups or name in self._joining:
            raise BucketError(f"group {name} exists already")
        self._joining.add(name)
        try:
            group = Collective("gloo", (host, port), rank, size, name, float(timeout_s))
        except CollectiveError as error:
            raise BucketError(str(error)) from None
        finally:
            self._joining.discard(name)
        self._groups[name] = group
        if self._closed:
            group.close()
        while len(self._groups) > MAX_GROUPS:
            self.leave(next(iter(self._groups)))

    def receive(self, call: Mapping[str, Any]) -> Received:
        """Receive one bucket: as one flat tensor (`load_format` `flattened_bucket`), or tensor by tensor.

        Raises:
            BucketError: it did not come, or is none.
        """
        name, load_format = _text(call, "group_name"), call.get("load_format")
        records = _records(call)
        if load_format not in (None, "flattened_bucket"):
            raise BucketError(f"load_format: expected null or 'flattened_bucket', not {load_format!r:.100}")
        group = self._groups.get(name)
        if group is None:
            raise BucketError(f"group {name} was not joined here")
        flat = load_format is not None
        places, size = _lay_out(records, packed=flat)
        buffer = self._room(size)
        parts = [buffer[start:end] for start, end in places]
        try:
            group.broadcast([buffer[:size]] if flat else parts)
        except CollectiveError as error:
            self._groups.pop(name, None)
            raise BucketError(str(error)) from None
        tensors = []
        for (key, dtype, shape), (start, _), part in zip(records, places, parts, strict=True):
            aligned = part if start % dtype.itemsize == 0 else part.clone()
            tensors.append((key, aligned.view(dtype).view(shape)))
        return Received(tensors, buffer)

    def give_back(self, received: Received) -> None:
        """Have a buffer used again; its tensors are worth nothing from now on."""
        self._spare = received.buffer

    def leave(self, name: str) -> None:
        """Leave a group; raises BucketError where it is in none of this name."""
        group = self._groups.pop(name, None)
        if group is None:
            raise BucketError(f"group {name} was not joined here")
        group.close()

    def close(self) -> None:
        """Leave them all, and join no more. Idempotent."""
        self._closed = True
        for name in self.names:
            with suppress(BucketError):
                self.leave(name)

    def _room(self, size: int) -> torch.Tensor:
        buffer, self._spare = self._spare, None
        if buffer is None or buffer.numel() < size:
            try:
                buffer = torch.empty(size, dtype=torch.uint8)
            except (RuntimeError, TypeError) as error:  # the second for what is no size at all any more
                raise BucketError(f"no room for {size} bytes") from error
        return buffer


async def detached(name: str, work: Callable[[], T]) -> T:
    """Run work in a thread of its own; who is cancelled leaves it to itself."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    doing = Doing(name, work, tell)
    await done.wait()
    return doing.result(0)


def _records(call: Mapping[str, Any]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    names, dtypes, shapes = (call.get(key) for key in ("names", "dtypes", "shapes"))
    if not isinstance(names, list) or not isinstance(dtypes, list) or not isinstance(shapes, list):
        raise BucketError("names, dtypes, shapes: expected three lists")
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise BucketError(
            f"expected names, dtypes, shapes of the same tensors, not {len(names)}, {len(dtypes)}, {len(shapes)}"
        )
    records = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
        if not isinstance(found, torch.dtype):
            raise BucketError(f"dtypes: torch has none called {dtype!r:.100}")
        if not isinstance(name, str) or not isinstance(shape, list):
            raise BucketError(f"names, shapes: {name!r:.100} {shape!r:.100} is no tensor")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise BucketError(f"shapes: {name}: {shape!r:.100} is none")
        records.append((name, found, tuple(shape)))
    return records


def _lay_out(
    records: list[tuple[str, torch.dtype, tuple[int, ...]]], *, packed: bool
) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor lies, in bytes; `packed`: one after the other, as SGLang has them, whatever their dtypes."""
    places, at = [], 0
    for _, dtype, shape in records:
        start = at if packed else -(-at // dtype.itemsize) * dtype.itemsize
        at = start + math.prod(shape) * dtype.itemsize
        places.append((start, at))
    return places, at


def _text(call: Mapping[str, Any], key: str) -> str:
    value = call.get(key, "nccl" if key == "backend" else "weight_update_group" if key == "group_name" else None)
    if not isinstance(value, str) or not value:
        raise BucketError(f"{key}: expected a string, not {value!r:.100}")
    return value


def _whole(call: Mapping[str, Any], key: str) -> int:
    value = call.get(key)
    if type(value) is not int or value < 0:
        raise BucketError(f"{key}: expected a whole number, not {value!r:.100}")
    return value
