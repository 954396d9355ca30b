"""The life of generations inside a faked vLLM engine: queue, pause, abort, weights. No I/O and no clock.

- A call is waiting, running, or over; over is final and happens once. Ids need not be unique: an abort reaches all.
- An abort takes effect at once on what waits, runs or is frozen; of an id that is not there nothing is remembered.
- A paused engine takes in what arrives and starts none of it. `keep` freezes what runs; `wait` lets it run to its end;
  `abort` ends everything first. `keep` that clears the cache preempts: what ran waits, first in the queue.
- Gauges are those of the last step. A paused engine takes none, save for an abort.
- Loading weights leaves cached prefixes as they are. Loading that failed poisons: the next generation that starts
  kills the core, unless weights were loaded well before it.
- Asleep it is paused, until all its memory is back; to go on, or to load weights, without memory kills the core. A
  cache that was released alone leaves it paused.
- Nothing ends by itself: a call ends by `finish`, by an abort, by the death of the core, or by `reset`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from tests.support.faults import Fault, Hang, Reset, Status
from tests.support.sglang_wire import Reply
from tests.support.vllm_wire import CORE_DEAD, ID_PREFIX, budget
from tests.support.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DEFAULT_WEIGHT_VERSION", "Call", "Core", "PauseMode"]

DEFAULT_WEIGHT_VERSION = "default"
"""Weight label of an engine that was just started."""

State = Literal["waiting", "running", "over"]
PauseMode = Literal["abort", "wait", "keep"]


class Call:
    """One `/inference/v1/generate` call that the engine accepted; `rid` as it was sent, `engine_id` as it is known."""

    __slots__ = (
        "body", "deaf", "headers", "labels", "max_tokens", "news", "outcome", "preempted", "rid", "state", "tokens",
        "weights",
    )  # fmt: skip

    def __init__(self, rid: str, body: dict[str, Any], headers: dict[str, str], context: int) -> None:
        self.rid = rid
        self.body = body
        self.headers = headers
        self.max_tokens = budget(body, context)
        self.state: State = "waiting"
        self.tokens = 0  # generated so far, where a test says so by `advance`
        self.labels: list[tuple[str, int]] = []  # (weight label, first token made under it)
        self.weights = 0  # which weights it started with, by their number
        self.preempted = False
        self.deaf = False
        self.outcome: asyncio.Future[Reply | Fault] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Call {self.rid} {self.state} tokens={self.tokens}>"

    @property
    def engine_id(self) -> str:
        """The id that aborts and answers use."""
        return ID_PREFIX + self.rid

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return list(self.body["token_ids"])

    @property
    def sampling(self) -> dict[str, Any]:
        """`sampling_params` as sent."""
        return dict(self.body["sampling_params"])

    def spans(self) -> list[dict[str, Any]]:
        """The weight labels its tokens were made under."""
        ends = [start for _, start in self.labels[1:]] + [self.tokens] * bool(self.labels)
        return [
            {"version": label, "start": start, "end": end}
            for (label, start), end in zip(self.labels, ends, strict=True)
            if end > start
        ]


class Core(Watched):
    """The engine behind the HTTP layer; mixed into its face."""

    def __init__(self, *, slots: int | None, context: int, weight_version: str) -> None:
        super().__init__()
        self.slots = slots
        self.context = context
        self.answer: Callable[[Call], Reply | Fault | None] | None = None
        self.tokens_so_far: int | Callable[[Call], int] = 3
        self.lose_aborts: bool | Callable[[Call], bool] = False
        self.hold_aborts = False
        self.requests: list[Call] = []
        self.live: list[Call] = []
        self.held_aborts: list[Call] = []
        self.paused: PauseMode | None = None
        self.weight_version = weight_version
        self.weights = 0
        self.cached: set[int] = set()
        self.stale_reads = 0
        self.poisoned = False
        self.dead = False
        self.asleep: set[str] = set()
        self.level = 0
        self.preemptions = 0
        self.max_running = 0
        self.gauges = (0, 0)
        self._filling = False

    # -- looking ---------------------------------------------------------------------------------------------

    def calls(self, state: State) -> list[Call]:
        """The live calls in that state, oldest first."""
        return [call for call in self.live if call.state == state]

    @property
    def running(self) -> int:
        """Generations that run, or stand frozen in their slots."""
        return len(self.calls("running"))

    @property
    def waiting(self) -> int:
        """Generations in the engine's queue, whether or not a gauge has seen them."""
        return len(self.calls("waiting"))

    @property
    def frozen(self) -> int:
        """Generations that have run and stand still."""
        if self.paused != "keep":
            return 0
        return self.running + sum(call.preempted for call in self.calls("waiting"))

    # -- generations -----------------------------------------------------------------------------------------

    def submit(self, rid: str, body: dict[str, Any], headers: dict[str, str]) -> Call:
        """Take a call in and start it where that is possible."""
        call = Call(rid, body, headers, self.context)
        self.requests.append(call)
        self.live.append(call)
        self.fill()
        return call

    def fill(self) -> None:
        """Start what waits, as far as pause and slots allow; rules answer at once."""
        if not self._filling:  # a rule that answers frees a slot: the loop below looks again
            self._filling = True
            try:
                while self._start_some():
                    pass
            finally:
                self._filling = False
        self._step()

    def _start_some(self) -> bool:
        if self.paused is not None or self.dead:
            return False
        free = len(self.live) if self.slots is None else self.slots - self.running
        # What was preempted goes back to the head of the queue.
        queue = sorted(self.calls("waiting"), key=lambda call: not call.preempted)
        started = queue[: max(free, 0)]
        if started and self.poisoned:
            self.die()
            return False
        for call in started:
            call.state, call.preempted = "running", False
        self.max_running = max(self.max_running, self.running)
        for call in started:
            self._begin(call)
        return bool(started)

    def _begin(self, call: Call) -> None:
        self.stale_reads += bool(self.cached - {self.weights})
        self.cached.add(self.weights)
        if call.labels:
            return
        call.labels.append((self.weight_version, 0))
        call.weights = self.weights
        fate = self.answer(call) if self.answer is not None else None
        if fate is not None:
            self.finish(call, fate)

    def finish(self, call: Call, fate: Reply | Fault) -> None:
        """End a call; the first `Reset` or `Hang` ends only its HTTP side."""
        if call.state == "over":
            return
        if isinstance(fate, Reply):
            call.tokens = len(fate.ids(call.max_tokens))
        if isinstance(fate, Hang):
            call.deaf = True
        else:
            if not call.outcome.done():
                call.outcome.set_result(fate)
            if not isinstance(fate, Reset):
                self._leave(call)
        call.news.set()
        self._step()

    def _leave(self, call: Call) -> None:
        call.state = "over"
        self.live.remove(call)
        self.fill()

    def drop(self, call: Call) -> None:
        """Forget a call whose client has gone: the engine noticed, paused or not."""
        if call.state != "over":
            self._leave(call)
            call.outcome.cancel()
        self._step(abort=True)

    def advance(self, call: Call, tokens: int) -> None:
        """Let a running call make that many tokens more."""
        call.tokens += tokens
        call.news.set()
        self._step()

    # -- aborts ----------------------------------------------------------------------------------------------

    def abort(self, engine_ids: Sequence[Any] | None = None) -> int:
        """Abort by the engine's ids, or all with None; say how many were named, whether or not they are there."""
        targets = [call for call in self.live if engine_ids is None or call.engine_id in engine_ids]
        for call in sorted(targets, key=lambda call: call.state == "running"):  # or a slot that comes free starts one
            lost = self.lose_aborts(call) if callable(self.lose_aborts) else self.lose_aborts
            if lost or call.deaf:
                continue
            if self.hold_aborts:
                self.held_aborts.append(call)
            else:
                self._abort_now(call)
        self._step(abort=True)
        return len(targets) if engine_ids is None else len(engine_ids)

    def settle_aborts(self) -> int:
        """Let the held aborts take effect; say how many."""
        held, self.held_aborts = self.held_aborts, []
        live = [call for call in held if call.state != "over"]
        for call in live:
            self._abort_now(call)
        return len(live)

    def _abort_now(self, call: Call) -> None:
        self.finish(call, Reply(tokens=self.partial(call), finish="abort"))

    def partial(self, call: Call) -> int:
        """How many tokens an abort finds; none where the call never ran."""
        if call.tokens or not call.labels:
            return call.tokens
        said = self.tokens_so_far(call) if callable(self.tokens_so_far) else self.tokens_so_far
        return min(said, call.max_tokens)

    # -- pause -----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop starting things, and return when the mode has been reached."""
        self.paused = mode
        if mode == "abort":
            self.abort()
        self.changed()
        if mode == "wait":
            await self.until(lambda: not self.running or self.paused != "wait", "drained for a pause", None)
        if clear_cache:
            for call in self.calls("running"):
                call.state, call.preempted = "waiting", True
                self.preemptions += 1
            self.cached.clear()
        self.changed()

    def resume(self) -> None:
        """Go on."""
        self.paused = None
        if self.asleep:
            self.die()
        self.fill()

    def sleep(self, level: int) -> None:
        """Abort everything and give memory up."""
        self.paused, self.level, self.asleep = "abort", level, {"weights", "kv_cache"} if level else set()
        self.poisoned |= level > 1  # the weights are not kept
        self.abort()
        self.cached.clear()
        self.changed()

    def release_cache(self) -> bool:
        """Give the cache up, alone; only while paused and wholly awake."""
        if self.paused is None or self.asleep:
            return False
        self.level, self.asleep = 0, {"kv_cache"}
        self.cached.clear()
        self.changed()
        return True

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory back; when all of a sleep is back it goes on."""
        slept = bool(self.asleep and self.level)
        self.asleep -= set(tags or self.asleep)
        if slept and not self.asleep:
            self.resume()
        self.changed()

    def _step(self, *, abort: bool = False) -> None:
        """What a step of the engine shows; with nothing to run, only an abort makes it take one."""
        if self.paused in {None, "wait"} or abort:
            self.gauges = (self.running, self.waiting)
        self.changed()

    # -- weights ---------------------------------------------------------------------------------------------

    def load(self, *, broken: bool = False) -> None:
        """Load other weights, which heals a load that failed; or fail. Cached prefixes stay."""
        if "weights" in self.asleep:
            self.die()
        self.poisoned = broken
        self.weights += not broken
        self.changed()

    def reset_cache(self, *, preempt: bool = False) -> bool:
        """Drop cached prefixes; refused while something holds blocks, unless it may be preempted."""
        if self.running and not preempt:
            return False
        for call in self.calls("running"):
            call.state, call.preempted = "waiting", True
            self.preemptions += 1
        self.cached.clear()
        self.fill()
        return True

    def set_version(self, label: str) -> None:
        """Give the weights a new label; what lives through it gets a new span."""
        self.weight_version = label
        for call in self.live:
            if call.labels and call.labels[-1][0] != label:
                call.labels.append((label, call.tokens))
        self.changed()

    # -- death -----------------------------------------------------------------------------------------------

    def die(self) -> None:
        """The core dies: everything in flight is answered 500, and the server will end soon."""
        self.dead = True
        for call in list(self.live):
            call.state = "over"
            if not call.outcome.done():
                call.outcome.set_result(Status(500, CORE_DEAD))
            call.news.set()
        self.live.clear()
        self.changed()

    def reset(self) -> None:
        """Lose everything, as a process that ends does."""
        for call in list(self.live):
            call.state = "over"
            if not call.outcome.done():
                call.outcome.set_result(Reset())
            call.news.set()
        self.live.clear()
        self.held_aborts.clear()
        self.cached.clear()
        self.paused, self.weight_version, self.gauges = None, DEFAULT_WEIGHT_VERSION, (0, 0)
        self.poisoned = self.dead = False
        self.asleep.clear()
        self.changed()
