"""A hand-written LMDeploy-dialect server in this process: real sockets, no clock, its own quirks on demand.

- A generation is held until the test ends it (`release`), an abort reaches it, or the rule `answer` decided it.
- Nothing sleeps: what a server does after a delay (its health monitor, its gauges, its look at who has gone) happens
  here when the test says so.
- `script` strikes a call before it is accepted; a fault returned by `answer` or given to `release` strikes after.
- Everything is recorded: `hits`, `requests`, `aborts`, `updates`.
"""

from __future__ import annotations

from tests.support.faults import Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.lmdeploy_core import Call
from tests.support.lmdeploy_routes import Routes
from tests.support.routing import Routing
from tests.support.sglang_wire import Finish, Reply

__all__ = ["Call", "Cut", "FakeLMDeploy", "Hang", "Mangled", "Raw", "Reply", "Reset", "Status", "Twice"]


class FakeLMDeploy(Routes):
    """One server on a port of its own: `async with FakeLMDeploy() as engine: engine.url`.

    Args:
        slots: its `--max-batch-size`: how many generations have a handle at once, the rest wait. None: all.
        context: longest prompt, in tokens.
        api_key: bearer of every route but a few; None: open.
        model: what it says it serves.
        abort_handling: started with `--enable-abort-handling`.
        logprobs: started with a `--logprobs-mode`.
        pytorch: the PyTorch backend; TurboMind fails where it is asked for its engine info.
        experts: the routing of its model, started with `--enable-return-routed-experts`; None: without.
        docs: not started with `--disable-fastapi-docs`.
        metrics: not started with `--disable-metrics`.
        max_concurrent: its `--max-concurrent-requests`: how many calls of *any* route are in work, the rest wait.
        handler_cancellation: whether a client that leaves ends its generation at once; else it runs on until
            `notice_disconnects`.

    Attributes to set at any time:
        answer: a rule, asked once when a generation starts: `Call` to `Reply`, to a fault, or to None (hold it).
        tokens_so_far: partial tokens an abort finds where the test did not `advance` the call: a number or a rule.
        lose_aborts: True, or which calls: their aborts are answered 200 and do nothing.
        hold_aborts: aborts are answered 200 and take effect at `settle_aborts`.
        health: what its monitor would find: `healthy`, `sleeping`, `initializing` or `unhealthy`; None: what is true.
        lose_experts: answers lack the routed experts, although they were asked for.
        share_experts: keeps an array of routed experts and returns its key, as on Ray; None: they are in the answer.
        fail_update: weight updates fail after they changed something, as an uncaught error.
        ranks: its tensor-parallel ranks, and whether they open events; a flattened bucket is loaded into each.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        context: int = 4096,
        api_key: str | None = None,
        model: str = "tiny-model",
        abort_handling: bool = True,
        logprobs: bool = True,
        pytorch: bool = True,
        experts: Routing | None = None,
        docs: bool = True,
        metrics: bool = True,
        max_concurrent: int | None = None,
        handler_cancellation: bool = False,
    ) -> None:
        super().__init__(slots=slots)
        self.handler_cancellation = handler_cancellation
        self.context = context
        self.api_key = api_key
        self.model = model
        self.abort_handling = abort_handling
        self.logprobs = logprobs
        self.pytorch = pytorch
        self.experts = experts
        self.docs = docs
        self.metrics = metrics
        self.max_concurrent = max_concurrent

    def __repr__(self) -> str:
        states = f"waiting={self.waiting} running={self.running} asleep={sorted(self.asleep)}"
        return f"<FakeLMDeploy port={self.port} {states} weights={self.weights} {list(self.live.values())}>"

    # --- what a test does

    async def wait_running(self, count: int) -> None:
        """Wait until at least that many generations run."""
        await self.until(lambda: self.running >= count, f"{count} running")

    async def wait_requests(self, count: int) -> None:
        """Wait until at least that many generations were accepted since the start."""
        await self.until(lambda: len(self.requests) >= count, f"{count} requests")

    async def wait_aborts(self, count: int) -> None:
        """Wait until at least that many good `/abort_request` calls arrived since the start."""
        await self.until(lambda: len(self.aborts) >= count, f"{count} aborts")

    async def wait_idle(self) -> None:
        """Wait until the engine holds nothing."""
        await self.until(lambda: not self.live, "nothing live")

    def release(
        self,
        call: Call | None = None,
        tokens: int | list[int] | None = None,
        finish: Finish = "stop",
        *,
        fate: Reply | Fault | None = None,
    ) -> int:
        """End one generation, or with None all that run or wait; say how many.

        Args:
            call: which.
            tokens: how many ids, or the ids, the stop token included.
            finish: finish reason.
            fate: instead of the two above: a whole reply, or a fault.
        """
        calls = self.calls("running") + self.calls("waiting") if call is None else [call]
        for each in calls:
            self.finish(each, Reply(tokens=tokens, finish=finish) if fate is None else fate)
        return len(calls)

    def notice_disconnects(self) -> int:
        """Drop every running generation whose client has gone, as each of its outputs looks; say how many.

        One that waits for a handle is looked at when it has one.
        """
        gone = [call for call, request in self.clients.items() if request.transport is None and call.state == "running"]
        for call in gone:
            self.drop(call)
        return len(gone)
