"""A hand-written vLLM in this process: real sockets, no clock, every misdeed on demand.

- A generation is held until the test ends it (`release`), an abort reaches it, or the rule `answer` decided it.
- Nothing sleeps: what an engine does after a delay happens here when the test says so.
- `script` strikes a call before it is accepted; a fault returned by `answer` or given to `release` strikes after.
- Everything is recorded: `hits`, `requests`, `aborts`, `updates`.
"""

from __future__ import annotations

from tests.support.faults import Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.routing import Routing
from tests.support.sglang_wire import Finish, Reply
from tests.support.vllm_core import DEFAULT_WEIGHT_VERSION, Call
from tests.support.vllm_routes import Routes

__all__ = ["Call", "Cut", "FakeVLLM", "Hang", "Mangled", "Raw", "Reply", "Reset", "Status", "Twice"]


class FakeVLLM(Routes):
    """One engine on a port of its own: `async with FakeVLLM() as engine: engine.url`.

    Args:
        slots: how many generations run at once; the rest wait. None: all.
        context: `max_model_len`, in tokens.
        vocabulary: ids from here on are refused.
        model: what it says it serves.
        api_key: key of `/v1` and `/inference`; None: open. Every other route is always open.
        scale_out: `--enable-scale-out`; without it `/inference` answers 403.
        dev_mode: `VLLM_SERVER_DEV_MODE=1`; without it the routes of control are not there.
        docs: whether `/openapi.json` is there.
        log_stats: whether `/metrics` has gauges.
        logprobs_mode: `--logprobs-mode`.
        experts: the routing of its model, started with `--enable-return-routed-experts`; None: without.
        processes: how many API processes it says it has.
        weight_version: label of the weights it starts with (a restart always comes back with `default`).
        handler_cancellation: whether a client that leaves ends its generation at once, as with the real one; else it
            runs on until `notice_disconnects`.

    Attributes to set at any time:
        answer: a rule, asked once when a generation starts: `Call` to `Reply`, to a fault, or to None (hold it).
        tokens_so_far: partial tokens an abort finds where the test did not `advance` the call: a number or a rule.
        lose_aborts: True, or which calls: their aborts are answered well and do nothing.
        hold_aborts: aborts are answered well and take effect at `settle_aborts`.
        lose_experts: answers lack the routed experts.
        transfer: `backend` of its `--weight-transfer-config`; None: without.
        sleep_mode: `--enable-sleep-mode`, as it says; `releases_cache`: new enough to give the cache up alone.
        fail_update: True, or the trouble: loading weights answers 500 and leaves them half loaded.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        context: int = 4096,
        vocabulary: int = 1 << 20,
        model: str = "tiny-model",
        api_key: str | None = None,
        scale_out: bool = True,
        dev_mode: bool = True,
        docs: bool = True,
        log_stats: bool = True,
        logprobs_mode: str = "raw_logprobs",
        processes: int = 1,
        experts: Routing | None = None,
        weight_version: str = DEFAULT_WEIGHT_VERSION,
        handler_cancellation: bool = True,
    ) -> None:
        super().__init__(slots=slots, context=context, weight_version=weight_version)
        self.vocabulary = vocabulary
        self.model = model
        self.api_key = api_key
        self.scale_out = scale_out
        self.dev_mode = dev_mode
        self.docs = docs
        self.log_stats = log_stats
        self.logprobs_mode = logprobs_mode
        self.processes = processes
        self.experts = experts
        self.handler_cancellation = handler_cancellation

    def __repr__(self) -> str:
        states = f"waiting={self.waiting} running={self.running} {self.live}"
        return f"<FakeVLLM port={self.port} {states} paused={self.paused} weights={self.weight_version}>"

    # -- what tests do ---------------------------------------------------------------------------------------

    async def wait_running(self, count: int) -> None:
        """Wait until at least that many generations run."""
        await self.until(lambda: self.running >= count, f"{count} running")

    async def wait_requests(self, count: int) -> None:
        """Wait until at least that many generations were accepted since the start."""
        await self.until(lambda: len(self.requests) >= count, f"{count} requests")

    async def wait_aborts(self, count: int) -> None:
        """Wait until at least that many good calls to abort arrived since the start."""
        await self.until(lambda: len(self.aborts) >= count, f"{count} aborts")

    async def wait_idle(self) -> None:
        """Wait until the engine holds nothing."""
        await self.until(lambda: not self.live, "nothing live")

    def call(self, rid: str) -> Call:
        """The live call with that id, as it was sent."""
        return next(call for call in self.live if call.rid == rid)

    def release(
        self,
        rid: str | Call | None = None,
        tokens: int | list[int] | None = None,
        finish: Finish = "stop",
        *,
        fate: Reply | Fault | None = None,
    ) -> int:
        """End one generation, or with None all that run or wait; say how many. A frozen one ends too: engines lie."""
        calls = list(self.live) if rid is None else [rid if isinstance(rid, Call) else self.call(rid)]
        for call in calls:
            self.finish(call, Reply(tokens=tokens, finish=finish) if fate is None else fate)
        return len(calls)

    def notice_disconnects(self) -> int:
        """Drop every generation whose client has gone; say how many."""
        gone = [call for call, request in self.clients.items() if request.transport is None and call.state != "over"]
        for call in gone:
            self.drop(call)
        return len(gone)

    async def terminate(self) -> None:
        """Take a SIGTERM: what is in flight is aborted and answered, then the port closes."""
        answered = [call for call in self.clients if not call.outcome.done()]
        self.abort()
        await self.until(lambda: not any(call in self.clients for call in answered), "answered before the end")
        await self.kill()
