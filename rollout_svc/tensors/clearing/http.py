"""A process of shards reached over HTTP: the verbs of its data plane (`shards.plane`).

Invariants:

- Ids travel, never tensors; many of them travel in several requests, each far below what a data plane takes.
- Errors of aiohttp end here: what leaves is a `ShardFailure` or a `TimeoutError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson

from rollout_svc.errors import ShardFailure

__all__ = ["HttpPeer", "HttpPeers"]

IDS_PER_REQUEST: Final = 50_000
"""Some 2 MB of JSON."""
KEEP_ALIVE_S: Final = 15.0
"""Shorter than a server's own, so that no idle connection is reset under a request."""


class HttpPeer:
    """One process.

    Args:
        address: of its data plane, `http://host:port[/prefix]`.
        session: gives the session of the running loop.
        token: bearer token of the data plane, where it wants one.
    """

    def __init__(self, address: str, session: Callable[[], aiohttp.ClientSession], token: str | None = None) -> None:
        self._address = address.rstrip("/")
        self._session = session
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def __repr__(self) -> str:
        return f"<HttpPeer {self._address}>"

    async def drain(self, ids: Sequence[str]) -> str | None:
        """`POST drain`; who answered is known of its statistics."""
        await self._send("drain", ids)
        return None

    async def drop(self, ids: Sequence[str]) -> str | None:
        """`POST drop`."""
        await self._send("drop", ids)
        return None

    async def flush(self) -> str | None:
        """`POST flush`."""
        await self._call("POST", "flush", b"{}")
        return None

    async def renew(self, ids: Sequence[str]) -> str | None:
        """`POST renew`."""
        await self._send("renew", ids)
        return None

    async def stats(self) -> Mapping[str, Any]:
        """`GET stats`."""
        found = await self._call("GET", "stats")
        if not isinstance(found, dict):
            raise ShardFailure("invalid", f"{self._address} answered no figures")
        return found

    async def _send(self, verb: str, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), IDS_PER_REQUEST):
            await self._call("POST", verb, orjson.dumps({"ids": ids[start : start + IDS_PER_REQUEST]}))

    async def _call(self, method: str, verb: str, body: bytes | None = None) -> Any:
        url = f"{self._address}/{verb}"
        try:
            async with self._session().request(method, url, data=body, headers=self._headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise ShardFailure("unreachable", f"{url}: {error}") from error
        if response.status != 200:  # noqa: PLR2004 - OK
            reason = "unauthorized" if response.status == 401 else "invalid"  # noqa: PLR2004
            raise ShardFailure(reason, f"{url} answered {response.status}: {answer[:200].decode(errors='replace')}")
        try:
            return orjson.loads(answer)
        except ValueError as error:
            raise ShardFailure("invalid", f"{url} answered no JSON: {error}") from error


class HttpPeers:
    """Makes peers that share one session, made in the loop that first uses it.

    Args:
        token: bearer token of all of them, where they want one.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    def __call__(self, address: str) -> HttpPeer:
        """Make the peer of an address."""
        return HttpPeer(address, self._open, self._token)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=4, keepalive_timeout=KEEP_ALIVE_S)
            # whoever calls has the deadline
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)  # lets the transports end
