"""JSON asked of a service over HTTP, for judgers whose verdicts come from one.

Invariants:

- What may pass is tried again: no connection, one that broke, 429 and 5xx; the wait is what `Retry-After` says, else
  it doubles, with jitter. Everything else, and the last try, is a JudgeFailed with its reason.
- Nothing here ends the whole: whoever calls has a time limit over all tries, and cancels.
- A session belongs to the loop that uses it. Redirects are not followed, for they would take the key elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any, Final

import aiohttp
import orjson
import tenacity

from rollout_svc.errors import ConfigError
from rollout_svc.judging import JudgeFailed

__all__ = ["Remote", "check_url", "retry_after_s"]

_BACKOFF_S: Final = 0.25  # seconds before the second try, doubling, jittered
_BACKOFF_CAP_S: Final = 10.0
_CONNECT_S: Final = 10.0  # for one connection
_ANSWER_BYTES: Final = 1 << 20  # a verdict is small
_TOLD_CHARS: Final = 200  # of an answer that is no verdict
_TOO_MANY: Final = 429


class _Passing(Exception):
    """Raised when a try failed in a way that may pass."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class Remote:
    """One address that JSON is posted to."""

    def __init__(self, url: str, headers: Mapping[str, str], tries: int, rng: Random | None = None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        self._tries = tries
        self._rng = rng or Random()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, body: Any) -> Any:
        """Post a body, and return what came back, decoded.

        Raises:
            JudgeFailed: `unreachable`, `http_NNN` or `invalid_answer`.
        """
        payload = orjson.dumps(body)
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._tries),
            wait=self._wait,
            retry=tenacity.retry_if_exception_type(_Passing),
            reraise=True,
        )
        try:
            return await retrying(self._try, payload)
        except _Passing as failed:
            raise JudgeFailed(failed.reason, f"{failed.message}, {self._tries} times") from failed

    async def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    async def _try(self, payload: bytes) -> Any:
        try:
            async with self._open().post(self._url, data=payload, allow_redirects=False) as response:
                text = await _read(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _Passing("unreachable", f"{self._url}: {type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise JudgeFailed("unreachable", f"{self._url}: {type(error).__name__}: {error}") from error
        status = response.status
        if status == _TOO_MANY or status >= 500:  # noqa: PLR2004 - the servers' own
            wait_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
            raise _Passing(f"http_{status}", f"{self._url} answered {status}: {_told(text)}", wait_s)
        if not response.ok or response.status != 200:  # noqa: PLR2004 - the one that carries a verdict
            raise JudgeFailed(f"http_{status}", f"{self._url} answered {status}: {_told(text)}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise JudgeFailed("invalid_answer", f"{self._url}: no JSON ({error}): {_told(text)}") from error

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _wait(self, state: tenacity.RetryCallState) -> float:
        failed = state.outcome.exception() if state.outcome is not None else None
        if isinstance(failed, _Passing) and failed.retry_after_s is not None:
            return failed.retry_after_s
        backoff: float = min(_BACKOFF_CAP_S, _BACKOFF_S * 2.0 ** (state.attempt_number - 1))
        return backoff * self._rng.uniform(0.5, 1.0)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Read `Retry-After`, seconds or a date; None where it says nothing that can be used."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


def check_url(value: object, option: str) -> str:
    """Return an http address as it was given.

    Raises:
        ConfigError: at the option, if it is none.
    """
    if not isinstance(value, str) or not value.startswith(("http://", "https://")) or any(map(str.isspace, value)):
        raise ConfigError.at(option, f"{value!r} is not an http(s) address")
    return value


async def _read(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > _ANSWER_BYTES:
            response.close()
            raise JudgeFailed("invalid_answer", f"{response.url}: more than {_ANSWER_BYTES} bytes")
    return bytes(text)


def _told(text: bytes) -> str:
    return repr(text[:_TOLD_CHARS].decode("utf-8", "replace"))
