"""One service as HTTP: a request out, its answer decoded or its error raised.

Invariants:

- An error body becomes its class of `rollout_svc.errors`; no answer at all is `Unreachable`. Nothing above sees an
  aiohttp error.
- Every request has a bound, and none is repeated: whether a lost one took effect is for the caller to ask.
- The session is made in the loop that first uses it.
"""

from __future__ import annotations

import re
from typing import Any, Final

import aiohttp
import orjson

from rollout_svc.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    Gone,
    NotFound,
    NotNow,
    ServiceError,
    Unauthorized,
    Unreachable,
)

__all__ = ["Wire"]

Json = dict[str, Any]

_SUCCESS: Final = range(200, 300)
_UNSENDABLE: Final = re.compile(r"[\r\n\0]")  # no header can have these
RETRY_AFTER_S: Final = 1.0
"""Assumed where a 503 names no time."""
BODY_EXCERPT: Final = 200
"""Bytes of a foreign answer that go into an error message."""
_BY_STATUS: Final[dict[int, type[ServiceError]]] = {
    400: BadRequest,
    401: Unauthorized,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: BadRequest,
    422: BadRequest,
}


class Wire:
    """The connections to one service."""

    __slots__ = ("_headers", "_session", "url")

    def __init__(self, url: str, token: str | None = None) -> None:
        if token is not None and _UNSENDABLE.search(token):
            raise ConfigError.at("token", "a token is one line: it has a line break or a NUL in it")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_open(self) -> bool:
        """Whether a session is held."""
        return self._session is not None and not self._session.closed

    async def close(self) -> None:
        """Close the connections; idempotent, and the next request opens them again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """Send one request and return the JSON object it is answered with.

        Raises:
            ServiceError: the service refused; the class says how.
            ConfigError: the url is none.
            Unreachable: there was no answer, or not in `timeout_s`.
        """
        status, raw, retry_after = await self.send(method, path, body, timeout_s)
        return _decode(status, raw, retry_after, f"{method} {path}")

    async def fetch(self, method: str, path: str, body: Json | None, timeout_s: float, media: str) -> bytes:
        """Send one request that is to be answered in another media type than JSON, and return the body of the answer.

        Raises:
            ServiceError: as `call`.
        """
        status, raw, retry_after = await self.send(method, path, body, timeout_s, media)
        if status not in _SUCCESS:
            _decode(status, raw, retry_after, f"{method} {path}")
        return raw

    async def send(
        self, method: str, path: str, body: Json | None, timeout_s: float, accept: str | None = None
    ) -> tuple[int, bytes, str | None]:
        """Send one request; returns status, body and the `Retry-After` header."""
        if self._session is None or self._session.closed:
            # Unlimited connections: a pause must not queue behind a take that waits.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        if accept is not None:
            headers = {**headers, "Accept": accept}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                return response.status, await response.read(), response.headers.get("Retry-After")
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ConfigError.at("url", f"expected http://HOST[:PORT], not {self.url!r}") from error
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self.url} to {method} {path} within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"no rollout service at {self.url}: {error}") from error
        except aiohttp.ClientError as error:
            raise Unreachable(
                f"{self.url} gave no answer to {method} {path}: {error or type(error).__name__}"
            ) from error


def _decode(status: int, raw: bytes, retry_after: str | None, call: str) -> Json:
    """Return the body of an answer, or raise its error."""
    try:
        body = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError:
        body = None
    if status not in _SUCCESS:
        raise _error(status, body, raw, retry_after, call)
    if not isinstance(body, dict):
        raise ServiceError(f"{call}: the answer is not a JSON object: {_excerpt(raw)}")
    return body


def _error(status: int, body: Any, raw: bytes, retry_after: str | None, call: str) -> ServiceError:
    """Make the exception of an error answer, also of one that is not ours (a proxy's page)."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": f"{call}: HTTP {status}: {_excerpt(raw)}"}
    message, kind, detail = (
        str(error.get("message") or f"{call}: HTTP {status}"),
        error.get("type"),
        error.get("detail"),
    )
    if status == NotNow.status:
        return NotNow(kind or "failed", message, detail=detail, retry_after_s=_seconds(retry_after))
    return _BY_STATUS.get(status, ServiceError)(message, type=kind, detail=detail)


def _excerpt(raw: bytes) -> str:
    text = " ".join(raw[:BODY_EXCERPT].decode(errors="replace").split())
    return text or "(empty)"


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after)) if retry_after else RETRY_AFTER_S
    except ValueError:
        return RETRY_AFTER_S
