"""A fault-injecting engine as a process of its own, and the hand that strikes it."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from bench.process import Child

__all__ = ["ChaosProcess"]

CALL_S = 30.0
"""How long an engine may take to do as it is told, in seconds, before the test fails."""


class ChaosProcess:
    """`tests.support.chaos_engine` for the length of a `with`; it may die and come back on its port.

    Args:
        cancellation: whether a client that leaves ends its generation.
    """

    def __init__(self, cancellation: Literal["on", "off"] = "off") -> None:
        self._cancellation = cancellation
        self._child = self._make(0)
        self._frozen = False
        self.port = 0

    def _make(self, port: int) -> Child:
        arguments = ("--port", port, "--handler-cancellation", self._cancellation)
        return Child("tests.support.chaos_engine", *arguments)

    def __enter__(self) -> Self:
        self._child.__enter__()
        self.port = int(self._child.ready_line[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on()
        self._child.terminate()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    # -- telling it ------------------------------------------------------------------------------------------

    async def command(self, **wanted: Any) -> int:
        """Set `fault` or `delay_s`; returns how many generations run."""
        return await self._call("POST", "/chaos", wanted)

    async def running(self, least: int = 0, most: int = 1 << 30) -> int:
        """Wait until so many generations run there, by its own count."""
        return await self._call("GET", f"/chaos/running?least={least}&most={most}", None)

    async def _call(self, method: str, path: str, body: Any) -> int:
        # A connection of its own each time: what is open at the end is the service's.
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            answer = await response.json()
            return int(answer["running"])

    # -- striking it -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it as a crash does."""
        os.kill(self._child.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it where it is; its kernel goes on taking connections and bytes."""
        os.kill(self._child.pid, signal.SIGSTOP)
        self._frozen = True

    def go_on(self) -> None:
        """Let a frozen one go on; idempotent."""
        if self._frozen:
            self._frozen = False
            os.kill(self._child.pid, signal.SIGCONT)

    def come_back(self) -> None:
        """Start another process on the port of the one that was killed; blocks until it is ready."""
        self._child.terminate()
        self._child = self._make(self.port)
        self._child.__enter__()
