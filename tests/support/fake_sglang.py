"""A hand-written SGLang-dialect engine in this process: real sockets, no clock, every misdeed on demand.

- A generation is held until the test ends it (`release`), an abort reaches it, or the rule `answer` decided it.
- Nothing sleeps: what an engine does after a delay happens here when the test says so.
- `script` strikes a call before it is accepted; a fault returned by `answer` or given to `release` strikes after.
- Everything is recorded: `hits`, `requests`, `aborts`, `updates`.
"""

from __future__ import annotations

from tests.support.faults import Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.routing import Routing
from tests.support.sglang_core import DEFAULT_WEIGHT_VERSION, Call
from tests.support.sglang_routes import Routes
from tests.support.sglang_wire import Finish, Reply

__all__ = ["Call", "Cut", "FakeSGLang", "Hang", "Mangled", "Raw", "Reply", "Reset", "Status", "Twice"]


class FakeSGLang(Routes):
    """One engine on a port of its own: `async with FakeSGLang() as engine: engine.url`.

    Args:
        slots: how many generations run at once; the rest wait. None: all.
        context: longest prompt, in tokens.
        api_key: key of the data routes; None: open.
        admin_key: key of the control routes; None: the data key, if any.
        weight_version: label of the weights it starts with (a restart always comes back with `default`).
        model_path: what it says it serves, until an update from disk.
        tokenizer_path: what it says of its tokenizer; None: the first model's path. May be changed at any time.
        vocab_size: what it says of its vocabulary, if anything, as the built-in engine does. Likewise.
        handler_cancellation: whether a client that leaves ends its generation at once; else it runs on until
            `notice_disconnects`.
        report_spans: whether answers carry `weight_versions`.
        experts: the routing of its model, started with `--enable-return-routed-experts`; None: without.

    Attributes to set at any time:
        answer: a rule, asked once when a generation starts: `Call` to `Reply`, to a fault, or to None (hold it).
        tokens_so_far: partial tokens an abort finds where the test did not `advance` the call: a number or a rule.
        lose_aborts: True, or which calls: their aborts are answered 200 and do nothing.
        hold_aborts: aborts are answered 200 and take effect at `settle_aborts`.
        fail_update: True, or the message: weight updates answer 400 and change nothing.
        ranks: weights of each tensor-parallel rank; a flattened bucket is loaded into each.
        update_sessions: whether it is new enough to have, and to ask for, a begin and an end around tensor updates.
        lose_experts: answers lack the routed experts, although they were asked for.
        told: more that `/server_info` says; with `enable_memory_saver` it gives memory up, and weights come back as
            they were only with `enable_weights_cpu_backup`.
        memory_deaths: how often it died of being asked for memory while busy, or for what it did not have to give.
        spoilt: generations that ran without weights.
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
        tokenizer_path: str | None = None,
        vocab_size: int | None = None,
        handler_cancellation: bool = False,
        report_spans: bool = False,
        experts: Routing | None = None,
    ) -> None:
        super().__init__(slots=slots, weight_version=weight_version)
        self.context = context
        self.api_key = api_key
        self.admin_key = admin_key
        self.model_path = model_path
        self.tokenizer_path = tokenizer_path or model_path  # an update from disk leaves it as it is
        self.vocab_size = vocab_size
        self.handler_cancellation = handler_cancellation
        self.report_spans = report_spans
        self.experts = experts

    def __repr__(self) -> str:
        states = f"blocked={self.blocked} waiting={self.waiting} running={self.running}"
        states += f" paused={self.paused} weights={self.weight_version}"
        return f"<FakeSGLang port={self.port} {states} {list(self.live.values())}>"

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

    def notice_disconnects(self) -> int:
        """Drop every generation whose client has gone, as the engine's own poll does; say how many."""
        gone = [call for call, request in self.clients.items() if request.transport is None and call.state != "over"]
        for call in gone:
            self.drop(call)
        return len(gone)
