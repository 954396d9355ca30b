"""A bare client in LMDeploy's words, for tests of its fake."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.client import Answer, Client, Stream
from tests.support.fake_lmdeploy import FakeLMDeploy

__all__ = ["LMDeployClient"]


class LMDeployClient(Client):
    """A session against one fake; every verb returns a task that ends with (status, decoded body or None)."""

    def __init__(self, engine: FakeLMDeploy, key: str | None = None) -> None:
        super().__init__(engine, key)
        self._headers["Content-Type"] = "application/json"

    def ask(self, session_id: int, max_tokens: int = 100, **rest: Any) -> asyncio.Task[Answer]:
        """Ask for a generation with logprobs from a prompt of three tokens."""
        return self.post("/generate", request(session_id, max_tokens, **rest))

    def follow(self, session_id: int, max_tokens: int = 100, **rest: Any) -> Stream:
        """Ask for the same as a stream."""
        return Stream(self, request(session_id, max_tokens, **rest) | {"stream": True})

    def abort_one(self, session_id: int) -> asyncio.Task[Answer]:
        """Abort by id."""
        return self.post("/abort_request", {"session_id": session_id})

    def abort_all(self) -> asyncio.Task[Answer]:
        """Abort everything."""
        return self.post("/abort_request", {"abort_all": True})


def request(session_id: int, max_tokens: int, **rest: Any) -> dict[str, Any]:
    """The body of `ask`."""
    body = {"session_id": session_id, "input_ids": [1, 2, 3], "max_tokens": max_tokens, "return_logprob": True}
    return body | rest
