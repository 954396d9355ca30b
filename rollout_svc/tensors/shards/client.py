"""A client of data planes over HTTP, for threads: fetches into memory that is given to it, and tells what to let go of.

Invariants:

- Every call ends by its deadline.
- A shard that could not be fetched has its own failure; the others of the same request are fetched.
- A request is sent again when a connection that had been idle broke before the answer began; the last time over one
  that is new. All calls are idempotent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import orjson

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.connection import Connection, read_whole, skip
from rollout_svc.tensors.shards.framing import LENGTH_BYTES, Record, head_length, read_head
from rollout_svc.tensors.shards.leaves import Blank
from rollout_svc.tensors.shards.names import Shard

__all__ = ["Client", "Transport", "Wanted", "copied"]

IDLE_S: Final = 10.0
"""Seconds after which a connection is not used again: less than a server keeps one."""
IDLE_CONNECTIONS: Final = 4
"""Kept for each address."""
MAX_ANSWER_BYTES: Final = 2**20
"""Of an answer in JSON."""
TIMEOUT_S: Final = 30.0


class Wanted(NamedTuple):
    """A shard, and the memory that its bytes are to be read into."""

    shard: Shard
    blank: Blank


def copied(shard: Shard, blank: Blank, data: np.ndarray[Any, np.dtype[np.uint8]]) -> ShardFailure | None:
    """Fill a blank from memory of as many bytes; return what went wrong, or None."""
    try:
        blank.memory[:] = data.data
    except ShardFailure as failure:
        return ShardFailure(failure.reason, f"shard {shard.id}: {failure.message}", (shard.id,))
    return None


class Transport(Protocol):
    """How the owners of one kind of address are reached."""

    def fetch(self, address: str, wanted: Sequence[Wanted], deadline: float) -> list[ShardFailure | None]:
        """Fill the blanks of shards of one owner; return, for each, what went wrong, or None.

        Args:
            address: of the owner.
            wanted: without duplicates.
            deadline: monotonic, seconds.
        """


class Client:
    """Speaks to data planes over HTTP; thread-safe.

    Args:
        token: bearer token of all of them.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._lock = Lock()
        self._idle: dict[str, list[Connection]] = {}

    def __repr__(self) -> str:
        return f"<Client {sum(map(len, self._idle.values()))} idle connections>"

    def fetch(self, address: str, wanted: Sequence[Wanted], deadline: float) -> list[ShardFailure | None]:
        """See `Transport`."""
        failures: list[ShardFailure | None] = [None] * len(wanted)
        rest = list(range(len(wanted)))
        while rest:
            try:
                rest = self._fetch_some(address, wanted, rest, failures, deadline)
            except ShardFailure as failure:  # of the request: of all that it was to bring
                for index in rest:
                    if failures[index] is None:
                        failures[index] = ShardFailure(failure.reason, failure.message, (wanted[index].shard.id,))
                break
        return failures

    def _fetch_some(
        self,
        address: str,
        wanted: Sequence[Wanted],
        rest: list[int],
        failures: list[ShardFailure | None],
        deadline: float,
    ) -> list[int]:
        """Ask for shards once; return the places of those to be asked for again. What was fetched leaves `rest`."""
        ids = [wanted[index].shard.id for index in rest]
        later: list[int] = []
        with self._answer(address, "POST", "fetch", orjson.dumps({"ids": ids}), deadline) as response:
            start = memoryview(bytearray(LENGTH_BYTES))
            read_whole(response, start)
            head = memoryview(bytearray(head_length(start)))
            read_whole(response, head)
            for index, record in zip(list(rest), read_head(head, ids), strict=True):
                if record.status == "later":
                    later.append(index)
                    continue
                failures[index] = _land(response, address, wanted[index], record)
                rest.remove(index)
        if len(later) == len(ids):
            raise ShardFailure("invalid", f"{address} answers that it will answer later, and nothing else")
        return later

    def post(self, address: str, call: str, ids: Sequence[str] | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Tell a data plane what to do with shards, or, without ids, with all: `renew`, `drop`, `drain`, `flush`.

        Raises:
            ShardFailure: `unreachable`, `timeout`, `unauthorized`, `invalid`.
        """
        body = orjson.dumps({} if ids is None else {"ids": list(ids)})
        return self._json(address, "POST", call, body, timeout_s)

    def stats(self, address: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Ask a data plane for its figures. Errors as `post`."""
        return self._json(address, "GET", "stats", None, timeout_s)

    def _json(self, address: str, method: str, call: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        with self._answer(address, method, call, body, time.monotonic() + timeout_s) as response:
            found = _decoded(response)
        if not isinstance(found, dict):
            raise ShardFailure("invalid", f"{address} answers {call} with something else than an object")
        return found

    @contextmanager
    def _answer(
        self, address: str, method: str, call: str, body: bytes | None, deadline: float
    ) -> Iterator[HTTPResponse]:
        """Have an answer of status 200, of which the body is to be read."""
        connection: Connection | None = None
        try:
            connection, response = self._sent(address, method, call, body, deadline)
            if response.status != 200:  # noqa: PLR2004 - OK
                raise _refusal(address, call, response)
            yield response
            response.read(0)  # an answer that was read to its end closes itself
            if connection.reusable():
                self._keep(address, connection)
                connection = None
        except TimeoutError as error:
            raise ShardFailure("timeout", f"{address} did not answer {call} in time: {error}") from error
        except (OSError, HTTPException) as error:
            raise ShardFailure("unreachable", f"{address}: {call}: {error!r}") from error
        finally:
            if connection is not None:
                connection.close()

    def _sent(
        self, address: str, method: str, call: str, body: bytes | None, deadline: float
    ) -> tuple[Connection, HTTPResponse]:
        while True:
            connection = self._connection(address)
            try:
                return connection, connection.send(method, call, body, deadline)
            except BaseException as error:
                connection.close()
                if connection.used and isinstance(error, (ConnectionError, HTTPException)):
                    continue  # the other side had closed it meanwhile
                raise

    def _connection(self, address: str) -> Connection:
        now = time.monotonic()
        old: list[Connection] = []
        found = None
        with self._lock:
            idle = self._idle.get(address, [])
            while idle and found is None:
                connection = idle.pop()
                if now - connection.idle_since < IDLE_S:
                    found = connection
                else:
                    old.append(connection)
            if not idle:
                self._idle.pop(address, None)
        for connection in old:
            connection.close()
        return found or Connection(address, self._token)

    def _keep(self, address: str, connection: Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            idle.append(connection)
            surplus = idle.pop(0) if len(idle) > IDLE_CONNECTIONS else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close what is idle; idempotent."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()


def _land(response: HTTPResponse, address: str, wanted: Wanted, record: Record) -> ShardFailure | None:
    """Read one shard into its blank, or past it where it is not what was wanted."""
    shard, blank = wanted
    if record.status != "ok":
        reason = record.status if record.status in {"missing", "too_big"} else "invalid"
        return ShardFailure(reason, f"shard {shard.id} ({shard.nbytes} bytes) at {address}", (shard.id,))
    if record.nbytes != blank.nbytes or record.meta != blank.meta:
        skip(response, record.nbytes)
        seen = f"{record.nbytes} bytes, {record.meta}, where {blank.nbytes} bytes, {blank.meta} were expected"
        return ShardFailure("invalid", f"shard {shard.id} at {address} has {seen}", (shard.id,))
    try:
        memory = blank.memory
    except ShardFailure as failure:
        skip(response, record.nbytes)
        return ShardFailure(failure.reason, f"shard {shard.id}: {failure.message}", (shard.id,))
    read_whole(response, memory)
    return None


def _decoded(response: HTTPResponse) -> Any:
    try:
        return orjson.loads(response.read(MAX_ANSWER_BYTES))
    except ValueError:
        return None


def _refusal(address: str, call: str, response: HTTPResponse) -> ShardFailure:
    found = _decoded(response)
    message = found["error"]["message"] if isinstance(found, dict) and "error" in found else ""
    reason = {401: "unauthorized", 403: "unauthorized"}.get(response.status, "invalid")
    if response.status >= 500:  # noqa: PLR2004 - the server's own fault
        reason = "unreachable"
    return ShardFailure(reason, f"{address} answers {call} with {response.status}: {message}")
