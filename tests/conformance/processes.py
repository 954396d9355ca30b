"""The built-in engine, a process of its own, as a site: hung by SIGSTOP, killed by SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from bench.process import Child
from rollout_svc.engines import Dialect, Reply, SGLangDialect
from tests.conformance.site import LOST_ABORTS, SLOTS
from tests.support.bell import WAIT_S

__all__ = ["ALL_CAPABILITIES", "BuiltInSite", "Engine"]

ALL_CAPABILITIES: Final = frozenset(
    {"abort", "abort_all", "count", "disk", "flush", "freeze_keep_kv", "freeze_drop_kv", "set_version", "stream"}
    | {"weight_version"}
)
_MAX_TOKENS: Final = 800  # most of a second, in which a pause is made
_CONTEXT: Final = 900
_LOOK_S: Final = 0.01  # seconds between two looks at its count
_WAIT_S: Final = 20.0


class Engine:
    """The process, for as many tests as like; started when it is first asked for."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self.port = 0

    def start(self) -> None:
        """Start it where it does not run."""
        if self._child is None or self._child.returncode is not None:
            arguments = ("--port", self.port, "--max-running", SLOTS, "--context", _CONTEXT)
            self._child = Child("rollout_svc.embedded", *arguments, ready="engine.ready").__enter__()
            self.port = int(self._child.ready_line[0].rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._child is not None and self._child.returncode is None:
            os.kill(self._child.pid, number)

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        if self._child is not None:
            self._child.terminate(0.0)


class BuiltInSite:
    """The built-in engine as a site."""

    name = "built-in"
    slots = SLOTS
    pace = 1.0
    wait_s = WAIT_S
    capabilities = ALL_CAPABILITIES
    worker: Mapping[str, Any] = {}
    kin: Mapping[str, Any] = {"model_path": "tiny", "tokenizer_path": "bytes"}
    unshown: Mapping[str, str] = {LOST_ABORTS: "it loses no aborts: only a fake does"}

    def __init__(self, engine: Engine) -> None:
        self.dialect: Dialect = SGLangDialect()
        self.sampling: Mapping[str, Any] = {"max_tokens": _MAX_TOKENS, "extra": {"ignore_eos": True}}
        self._engine = engine

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._engine.port}"

    async def wait_inside(self, count: int) -> None:
        """Ask it until it says so."""
        async with asyncio.timeout(_WAIT_S):
            while await self.own_count() < count:  # noqa: ASYNC110 - another process rings no bell here
                await asyncio.sleep(_LOOK_S)

    async def own_count(self) -> int:
        """Ask it, as the service does."""
        call = self.dialect.loads()
        async with aiohttp.ClientSession() as session, session.request(call.method, self.url + call.path) as response:
            return self.dialect.parse_loads(Reply(response.status, await response.read()))

    def finish(self) -> None:
        """They end by themselves, in a second or two."""

    def hang(self) -> None:
        """Stop the process: the kernel goes on taking connections for it."""
        self._engine.signal(signal.SIGSTOP)

    def hold_door(self) -> None:
        """The same: everything it is sent is read later."""
        self.hang()

    def heal(self) -> None:
        """Let it go on."""
        self._engine.signal(signal.SIGCONT)

    def lose_aborts(self) -> None:
        """It loses none."""
        raise NotImplementedError

    async def kill(self) -> None:
        """SIGKILL."""
        await asyncio.to_thread(self._engine.kill)

    async def restart(self) -> None:
        """Start it again, at its port."""
        await asyncio.to_thread(self._engine.start)
