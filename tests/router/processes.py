"""A real sglang-router and real built-in engines, as processes that end with this one.

- Whatever is started here is killed with the test process, also when that one is killed.
- An engine that was killed can be started again at the port it had, as a supervisor would do it.
- Nothing sleeps to be safe: a process counts as ready when it says or answers so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

__all__ = ["BUILT", "EngineProcess", "Router", "engine_process", "router_process"]

BUILT: Final = Path(os.environ.get("ROUTER_PYTHON", ".venv-router/bin/python"))
"""Python of the environment that has the router: `make test-router` builds it."""
START_S: Final = 50.0
POLL_S: Final = 0.02
# The router has no leash of its own: it is started by a line that asks the kernel to end it with its parent.
LEASHED: Final = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
sys.argv = ["launch_router", *sys.argv[1:]]
runpy.run_module("sglang_router.launch_router", run_name="__main__")
"""


@dataclass(slots=True)
class EngineProcess:
    """A built-in engine at a port that stays its own.

    Attributes:
        flags: of `rollout_svc.embedded`; `--port` beside them.
        url: where it listens.
    """

    flags: tuple[str, ...] = ()
    port: int = 0
    url: str = ""
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start it, at the port it had before if it had one; returns when it listens."""
        command = (sys.executable, "-m", "rollout_svc.embedded", "--port", str(self.port), "--die-with-parent")
        self.process = await asyncio.create_subprocess_exec(
            *command,
            *self.flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await self.process.stdout.readline()).decode()
        assert line.startswith("engine.ready url="), line
        self.url = line.split("url=")[1].strip()
        self.port = int(self.url.rpartition(":")[2])

    async def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """End it at once; returns when it is gone. Idempotent."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(sign)
        if self.process is not None:
            await self.process.communicate()


@asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[EngineProcess]:
    """Run a built-in engine."""
    engine = EngineProcess(flags)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.kill()


@dataclass(slots=True)
class Router:
    """A router and what it says of its engines."""

    url: str
    metrics_port: int
    process: asyncio.subprocess.Process
    log: Path

    async def engines(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """Its own list; empty while it does not answer."""
        try:
            async with session.get(f"{self.url}/workers") as response:
                listed: list[dict[str, Any]] = (await response.json())["workers"]
                return listed
        except aiohttp.ClientConnectionError:
            return []

    async def kill(self) -> None:
        """End it at once; returns when it is gone. Idempotent."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def router_process(engines: Sequence[str], log: Path, *flags: str) -> AsyncIterator[Router]:
    """Run a router in front of engines, its metrics on loopback; yields when it sends to all of them."""
    assert BUILT.exists(), f"no router at {BUILT}: `make test-router` builds its environment"
    port, metrics_port = _free_ports(2)
    router = None
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(BUILT),
            "-c",
            LEASHED,
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--log-level", "warn"),
            *flags,
            "--worker-urls",
            *engines,
            stdout=output,
            stderr=output,
        )
    router = Router(f"http://127.0.0.1:{port}", metrics_port, process, log)
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while sum(engine["is_healthy"] for engine in await router.engines(session)) < len(engines):
                assert process.returncode is None, f"it ended; see {log}"
                await asyncio.sleep(POLL_S)
        yield router
    finally:
        await router.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
