"""A hand-written SGLang-dialect engine in this process: real sockets, no clock, every misdeed on demand.

- A generation is held until the test ends it (`release`), an abort reaches it, or the rule `answer` decided it.
- Nothing sleeps: what an engine does after a delay happens here when the test says so.
- `script` strikes a call before it is accepted; a fault returned by `answer` or given to `release` strikes after.
- Everything is recorded: `hits`, `requests`, `aborts`, `updates`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from aiohttp import web

from tests.support.faults import Cut, Fault, Hang, Mangled, Raw, Refusal, Reset, Status, Twice
from tests.support.sglang_core import DEFAULT_WEIGHT_VERSION, Call
from tests.support.sglang_routes import Routes, reset_connection
from tests.support.sglang_wire import Finish, Reply

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Call", "Cut", "FakeSGLang", "Hang", "Mangled", "Raw", "Reply", "Reset", "Status", "Twice"]

KEEPALIVE_S = 3600.0
"""Idle life of a connection, in seconds: longer than any test, so that the client's own limit decides."""
BACKLOG = 4096
"""Listen queue: as many connections as a test may open at once."""


class FakeSGLang(Routes):
    """One engine on a port of its own: `async with FakeSGLang() as engine: engine.url`.

    Args:
        slots: how many generations run at once; the rest wait. None: all.
        context: longest prompt, in tokens.
        api_key: key of the data routes; None: open.
        admin_key: key of the control routes; None: the data key, if any.
        weight_version: label of the weights it starts with (a restart always comes back with `default`).
        model_path: what it says it serves, until an update from disk.
        handler_cancellation: whether a client that leaves ends its generation at once; else it runs on until
            `notice_disconnects`.
        report_spans: whether answers carry `weight_versions`.

    Attributes to set at any time:
        answer: a rule, asked once when a generation starts: `Call` to `Reply`, to a fault, or to None (hold it).
        tokens_so_far: partial tokens an abort finds where the test did not `advance` the call: a number or a rule.
        lose_aborts: True, or which calls: their aborts are answered 200 and do nothing.
        hold_aborts: aborts are answered 200 and take effect at `settle_aborts`.
        fail_update: True, or the message: weight updates answer 400 and change nothing.
        loads: the (running, waiting) that `/v1/loads` claims; None: the truth.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        context: int = 4096,
        api_key: str | None = None,
        admin_key: str | None = None,
        weight_version: str = DEFAULT_WEIGHT_VERSION,
        model_path: str = "tiny-model",
        handler_cancellation: bool = False,
        report_spans: bool = False,
    ) -> None:
        super().__init__(slots=slots, weight_version=weight_version)
        self.context = context
        self.api_key = api_key
        self.admin_key = admin_key
        self.model_path = model_path
        self.handler_cancellation = handler_cancellation
        self.report_spans = report_spans
        self.restarts = 0
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    def __repr__(self) -> str:
        states = f"blocked={self.blocked} waiting={self.waiting} running={self.running}"
        return f"<FakeSGLang port={self.port} {states} paused={self.paused} weights={self.weight_version}>"

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Generations that run in the engine, heard or not."""
        return len(self.calls("running"))

    @property
    def waiting(self) -> int:
        """Generations in the engine's queue."""
        return len(self.calls("waiting"))

    @property
    def frozen(self) -> int:
        """Generations that have run and stand still: in their slots (`in_place`) or back in the queue (`retract`)."""
        if self.paused not in {"in_place", "retract"}:
            return 0
        return self.running + sum(call.retracted for call in self.calls("waiting"))

    @property
    def blocked(self) -> int:
        """Calls held at the door of a paused or updating engine."""
        return len(self.calls("blocked"))

    def count(self, path: str) -> int:
        """How many calls of a route arrived, answered well or not."""
        return sum(hit == path for _, hit in self.hits)

    async def wait_running(self, count: int) -> None:
        """Wait until at least that many generations run."""
        await self.until(lambda: self.running >= count, f"{count} running")

    async def wait_requests(self, count: int) -> None:
        """Wait until at least that many generations were accepted since the start."""
        await self.until(lambda: len(self.requests) >= count, f"{count} requests")

    async def wait_aborts(self, count: int) -> None:
        """Wait until at least that many good `/abort_request` calls arrived since the start."""
        await self.until(lambda: len(self.aborts) >= count, f"{count} aborts")

    async def wait_hits(self, path: str, count: int) -> None:
        """Wait until a route was called at least that many times since the start."""
        await self.until(lambda: self.count(path) >= count, f"{count} calls of {path}")

    async def wait_idle(self) -> None:
        """Wait until the engine holds nothing."""
        await self.until(lambda: not self.live, "nothing live")

    def release(
        self,
        rid: str | Call | None = None,
        tokens: int | list[int] | None = None,
        finish: Finish = "stop",
        *,
        fate: Reply | Fault | None = None,
    ) -> int:
        """End one generation, or with None all that run or wait; say how many. A frozen one ends too: engines lie.

        Args:
            rid: which.
            tokens: how many ids, or the ids.
            finish: finish reason.
            fate: instead of the two above: a whole reply, or a fault.
        """
        if rid is None:
            calls = self.calls("running") + self.calls("waiting")
        else:
            calls = [rid if isinstance(rid, Call) else self.live[rid]]
        for call in calls:
            self.finish(call, Reply(tokens=tokens, finish=finish) if fate is None else fate)
        return len(calls)

    def script(self, path: str, *refusals: Refusal, times: int | None = 1) -> None:
        """Let the next calls of a route meet these, in order, each `times` times (None: for ever)."""
        self.scripts.setdefault(path, []).extend((refusal, times) for refusal in refusals)

    def heal(self, path: str | None = None) -> None:
        """Forget what was scripted for a route, or for all; calls that hang there go on, late."""
        for name in [path] if path is not None else [*self.scripts, *self.hung]:
            self.scripts.pop(name, None)
            for going_on in self.hung.pop(name, []):
                if not going_on.done():
                    going_on.set_result(True)

    def notice_disconnects(self) -> int:
        """Drop every generation whose client has gone, as the engine's own poll does; say how many."""
        gone = [call for call, request in self.clients.items() if request.transport is None and call.state != "over"]
        for call in gone:
            self.drop(call)
        return len(gone)

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(
            self.application(),
            handler_cancellation=self.handler_cancellation,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=0.0,
            access_log=None,
        )
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        assert self._runner is not None
        await self._runner.cleanup()

    async def listen(self) -> None:
        """Accept connections, on the port of before where there was one."""
        if self._site is None:
            assert self._runner is not None
            self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=BACKLOG)
            await self._site.start()
            self.port = self._site.port

    async def refuse(self) -> None:
        """Close the listener: new connections are refused; open ones live on."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def kill(self) -> None:
        """Die: the listener is closed, open connections are reset, everything in flight is lost."""
        await self.refuse()
        assert self._runner is not None
        server = self._runner.server
        for connection in list(server.connections if server is not None else ()):
            reset_connection(connection.transport)
        for going_on in [waiting for hung in self.hung.values() for waiting in hung]:
            if not going_on.done():
                going_on.set_result(False)
        self.hung.clear()
        self.healthy, self.update_open = True, False
        self.reset()
        await asyncio.sleep(0)  # the resets leave, and the handlers find no connection to answer on

    async def restart(self) -> None:
        """Die and come back on the same port, idle, with the weight label of a fresh start."""
        await self.kill()
        self.restarts += 1
        await self.listen()
