"""The body of an answer to a fetch: a head that says what became of each shard, then the bytes of those that are there.

```
4 bytes   length of the head, little-endian
head      JSON: {"shards": [{"id", "status": "ok", "nbytes", "dtype", "shape", "library"} | {"id", "status"}, …]}
bytes     of each shard that is ok, in the order of the head, with nothing between them
```

Statuses: `ok`; `missing` (dropped, expired, or never there); `too_big` (larger than one answer may be); `later` (did
not fit beside the others: to be asked for again).

Invariants:

- Every id that was asked for is answered, in the order in which it was asked for.
- The first shard that is there and not too big is always `ok`: whoever asks for the rest again comes to an end.
- No pickle: names and sizes are JSON, the rest is bytes.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import orjson

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.names import Meta
from rollout_svc.tensors.shards.owner import Found, ShardOwner

__all__ = ["LENGTH_BYTES", "MAX_HEAD_BYTES", "Framed", "Record", "frame", "head_length", "read_head"]

LENGTH_BYTES: Final = 4
MAX_HEAD_BYTES: Final = 64 * 2**20
Status = Literal["ok", "missing", "too_big", "later"]


class Record(NamedTuple):
    """What became of one shard.

    Attributes:
        id: of the shard.
        status: see the module.
        nbytes: bytes of it that follow.
        meta: what it looks like; None unless it is ok.
    """

    id: str
    status: str
    nbytes: int = 0
    meta: Meta | None = None


class Framed(NamedTuple):
    """An answer to be sent: its head with the length in front, and the bytes of each shard, where they lie."""

    head: bytes
    data: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole answer."""
        return len(self.head) + sum(piece.nbytes for piece in self.data)


def frame(owner: ShardOwner, ids: list[str], max_bytes: int) -> Framed:
    """Find shards, and make the answer of them; nothing is copied.

    Args:
        owner: who has them.
        ids: what is asked for.
        max_bytes: of tensors in one answer.
    """
    records: list[dict[str, Any]] = []
    data: list[memoryview] = []
    room = max_bytes
    for shard_id in ids:
        found = owner.find(shard_id)
        status = _status(found, room, max_bytes)
        if found is None or status != "ok":
            records.append({"id": shard_id, "status": status})
            continue
        meta, array = found
        records.append({"id": shard_id, "status": "ok", "nbytes": array.nbytes, **meta._asdict()})
        data.append(array.data)
        room -= array.nbytes
    head = orjson.dumps({"shards": records})
    return Framed(len(head).to_bytes(LENGTH_BYTES, "little") + head, data)


def _status(found: Found | None, room: int, max_bytes: int) -> Status:
    if found is None:
        return "missing"
    if found.data.nbytes > max_bytes:
        return "too_big"
    return "ok" if found.data.nbytes <= room else "later"


def head_length(data: bytes | bytearray | memoryview) -> int:
    """Read the length of a head from the first bytes of an answer.

    Raises:
        ShardFailure: `invalid`: no head is that long.
    """
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or not 0 < length <= MAX_HEAD_BYTES:
        raise ShardFailure("invalid", f"an answer to a fetch begins with a head of {length} bytes")
    return length


def read_head(data: bytes | bytearray | memoryview, ids: list[str]) -> list[Record]:
    """Read the head of an answer.

    Args:
        data: of the length that stood in front of it.
        ids: what was asked for, in that order.

    Raises:
        ShardFailure: `invalid`: it is not the answer to that.
    """
    try:
        records = [
            Record(
                str(found["id"]),
                str(found["status"]),
                int(found.get("nbytes", 0)),
                Meta.of((found["shape"], found["dtype"], found["library"])) if found["status"] == "ok" else None,
            )
            for found in orjson.loads(data)["shards"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ShardFailure("invalid", f"the head of an answer to a fetch: {error!r}") from error
    if [record.id for record in records] != ids or min((record.nbytes for record in records), default=0) < 0:
        raise ShardFailure("invalid", f"an answer to a fetch of {len(ids)} shards is about others")
    return records
