"""An agent of somebody else's, that takes a session of the task `chat` and speaks OpenAI's API to it."""

from __future__ import annotations

import http.client
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

__all__ = ["Agent"]

_WAIT_S: Final = 30.0


class Agent:
    """One session."""

    def __init__(self, url: str) -> None:
        """Take the session of the next sample."""
        self._url = url
        self._key: str | None = None
        status, told, _ = self._post("/sessions", {"task": "chat", "wait_s": 20})
        assert status == 200, told
        self._path = f"/sessions/{told['session_id']}"
        self._key = told["api_key"]

    def turn(self) -> tuple[int, Any, str | None]:
        """Ask for a turn; returns status, answer, and when to ask again."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        return self._post(f"{self._path}/v1/chat/completions", body)

    def end(self) -> None:
        """Be done."""
        status, told, _ = self._post(f"{self._path}/end", {})
        assert status == 200, told

    def _post(self, path: str, body: Any) -> tuple[int, Any, str | None]:
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_WAIT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request("POST", path, orjson.dumps(body), headers)
            response = connection.getresponse()
            return response.status, orjson.loads(response.read()), response.headers.get("Retry-After")
        finally:
            connection.close()
