"""The one HTTP transport: a session for data, and one for control.

Invariants:

- Control calls never share a connection, a pool or a limit with generation.
- In a loop with a lane for data (`loop.py`), data sockets are in it: a control answer is read in the next turn.
- Every aiohttp error leaves as WorkerFailure; a cancellation leaves as itself.
- A call with a value to be lifted is read through `lifting`; one without is read as if there were no such thing.
- A call is one attempt, and repeating it is the caller's decision. A control call alone is written a second time when
  the connection it was given turned out to be closed: each of them may be repeated, and an engine closes idle
  connections, and those it failed on, without a word.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from rollout_svc.engines.calls import Call, Lift, Reply
from rollout_svc.engines.dialect import StreamReader
from rollout_svc.engines.endpoint import Endpoint
from rollout_svc.engines.lifting import Lifting, new_threads
from rollout_svc.engines.sse import EventSplitter
from rollout_svc.errors import WorkerFailure
from rollout_svc.loop import in_bulk

__all__ = ["HttpTransport"]

# uvicorn closes idle connections after 5 s; ours must go first, or a request is written into a dying connection.
_KEEPALIVE_S: Final = 4.0
_OK: Final = 200
_CONNECT_S: Final = 10.0  # seconds for one TCP connect; a black-holed address otherwise takes minutes
_EVENTS: Final = "text/event-stream"
_CLOSED_UNDER_US: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_CONTROL_PER_WORKER: Final = 8  # connections: one is kept warm, the rest only for bursts of aborts by id


class _Connector(aiohttp.TCPConnector):
    """Knows which tasks wait for a connection to be made: not asked on the way of a call that finds one open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connecting: set[asyncio.Task[Any] | None] = set()

    async def _create_connection(self, *given: Any, **named: Any) -> Any:
        task = asyncio.current_task()
        self.connecting.add(task)
        try:
            return await super()._create_connection(*given, **named)
        finally:
            self.connecting.discard(task)


class HttpTransport:
    """Two aiohttp sessions, made in the loop that uses them."""

    __slots__ = ("_connector", "_control", "_data", "_threads")

    def __init__(self) -> None:
        # limit=0: the pool caps requests per worker; a second cap here would be an invisible queue.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._connector = _Connector(
            limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=60, socket_factory=_data_socket
        )
        self._data = aiohttp.ClientSession(
            connector=self._connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._control = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=_CONTROL_PER_WORKER, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=60
            ),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._threads = new_threads()

    @property
    def connecting(self) -> AbstractSet[asyncio.Task[Any] | None]:
        """Tasks whose generation call waits for its connection."""
        return self._connector.connecting

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call; the caller bounds it."""
        if call.lift is not None:
            return await self._lifted(endpoint, call, call.lift, None)
        return await self._send(self._data, endpoint, call, endpoint.data_headers)

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> Reply:
        """Make a generation call whose answer comes in parts; an engine that answers whole is read as ever."""
        if call.lift is not None:
            return await self._lifted(endpoint, call, call.lift, reader)
        url = endpoint.url + call.path
        with _failures(url):
            response = await self._data.request(
                call.method,
                endpoint.at(call.path),
                data=call.body,
                headers=endpoint.data_headers,
                allow_redirects=False,
            )
            try:
                if response.status != _OK or response.content_type != _EVENTS:
                    return Reply(
                        response.status, await response.read(), _retry_after(response.headers.get("Retry-After"))
                    )
                splitter = EventSplitter()
                async for data in response.content.iter_any():
                    for payload in splitter.feed(data):
                        reader.feed(payload)
                return Reply(_OK, b"")
            finally:
                response.close()  # one that was read to its end has given its connection back already

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make one short control attempt, at most `timeout_s` long."""
        headers = endpoint.admin_headers if call.admin else endpoint.data_headers
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send(self._control, endpoint, call, headers)
                except WorkerFailure as failure:
                    if not failure.accepted or not isinstance(failure.__cause__, _CLOSED_UNDER_US):
                        raise
                return await self._send(self._control, endpoint, call, headers)
        except TimeoutError as error:
            raise WorkerFailure(
                "control_timeout", f"{call.method} {call.path}: no answer in {timeout_s:.2f} s", accepted=True
            ) from error

    async def _lifted(self, endpoint: Endpoint, call: Call, lift: Lift, reader: StreamReader | None) -> Reply:
        """Make a generation call, and take a value out of its answer while that comes.

        Raises:
            SampleFailure: `experts_invalid`, `experts_too_large`; the connection is closed then.
        """
        with _failures(endpoint.url + call.path):
            response = await self._data.request(
                call.method,
                endpoint.at(call.path),
                data=call.body,
                headers={**endpoint.data_headers, "Accept-Encoding": "identity"},  # inflating would be done in the loop
                allow_redirects=False,
            )
            lifting: Lifting | None = None
            try:
                if response.status != _OK:
                    return Reply(
                        response.status, await response.read(), _retry_after(response.headers.get("Retry-After"))
                    )
                lifting = Lifting(lift, self._threads, response.content_length)
                body: list[bytes] = []
                splitter = EventSplitter() if reader is not None and response.content_type == _EVENTS else None
                async for data in response.content.iter_any():
                    rest = await lifting.feed(data)
                    if reader is None or splitter is None:
                        body.append(rest)
                        continue
                    for payload in splitter.feed(rest):
                        reader.feed(payload)
                rest, value = await lifting.finish()
                return Reply(_OK, b"".join([*body, rest]) if splitter is None else b"", lifted=value)
            finally:
                response.close()  # as in `stream`
                if lifting is not None:
                    lifting.close()

    @staticmethod
    async def _send(session: aiohttp.ClientSession, endpoint: Endpoint, call: Call, headers: dict[str, str]) -> Reply:
        with _failures(endpoint.url + call.path):
            response = await session.request(
                call.method, endpoint.at(call.path), data=call.body, headers=headers, allow_redirects=False
            )
            # Read to its end, or closed by `read` itself, a response has given its connection back: nothing to exit.
            # A body that came with its head, as most do when a pause cuts thousands at once, is there for the taking.
            content = response.content
            body = content.read_nowait() if content.is_eof() else await response.read()
            if response.status == _OK:
                return Reply(_OK, body)
            return Reply(response.status, body, _retry_after(response.headers.get("Retry-After")))

    async def close(self) -> None:
        """Close both sessions; idempotent."""
        await self._data.close()
        await self._control.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # what still runs there is a batch of a dead call's


class _failures:  # noqa: N801 - used as a function; a generator's context manager costs three times as much a call
    """Turn what aiohttp raises into WorkerFailure."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, asyncio.CancelledError):
            return
        if isinstance(error, aiohttp.ClientConnectorError):
            raise WorkerFailure("connection", f"{self._url}: {error}", hard=True) from error
        if isinstance(error, aiohttp.ServerTimeoutError):
            message = f"{self._url}: connect took over {_CONNECT_S:g} s"
            raise WorkerFailure("connection", message, hard=True) from error
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            raise WorkerFailure("connection", f"{self._url}: {error!r}", hard=True, accepted=True) from error


def _data_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    return in_bulk(socket.socket(*address[:3]))


def _retry_after(value: str | None) -> float | None:
    """Seconds form only; the date form is rare and means the same as saying nothing here, as nan and inf do."""
    try:
        seconds = float(value or "nan")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
