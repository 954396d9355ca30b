"""The life of generations inside a faked SGLang engine: queue, pause, abort, weight label. No I/O and no clock.

- A call is blocked (at the door), waiting (in the queue), running, or over; over is final and happens once.
- An abort by id reaches a call at most once: one that was lost at the door is never repeated (the engine's own quirk).
- A paused engine starts nothing; what arrives then is blocked, and starts in order of arrival on continue.
- A call is frozen while the engine is paused `in_place` or `retract` and it has run: in the first it keeps its slot and
  an abort waits for continue, in the second it is back in the queue and an abort is immediate. Of two pauses the later
  one says which; `abort` on top of either keeps it frozen and aborts all.
- A weight update of a paused engine waits for nothing; a frozen call gets a new span.
- Memory is given up and taken back by tags. Asked for while it holds a call, or for a tag that is not given up, the
  server dies, as the real one does; without its memory a call that would run does not.
- Nothing ends by itself: a call ends by `finish`, by an abort, or by `reset`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from tests.support.faults import Fault, Hang, Reset
from tests.support.sglang_wire import Finish, Reply
from tests.support.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Call", "Core"]

DEFAULT_MAX_NEW_TOKENS = 128
"""`max_new_tokens` of a request that does not say, in tokens: the engine's own default."""
DEFAULT_WEIGHT_VERSION = "default"
"""Weight label of an engine that was just started."""

State = Literal["blocked", "waiting", "running", "over"]


class Call:
    """One `/generate` call that the engine accepted."""

    __slots__ = (
        "abort_pending", "abort_sent", "body", "deaf", "headers", "labels", "news", "outcome", "retracted", "rid",
        "state", "tokens",
    )  # fmt: skip

    def __init__(self, rid: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.rid = rid
        self.body = body
        self.headers = headers
        self.state: State = "blocked"
        self.tokens = 0  # generated so far, where a test says so by `advance`
        self.labels: list[tuple[str, int]] = []  # (weight label, first token made under it)
        self.abort_sent = False
        self.abort_pending = False  # takes effect at the next step, which a frozen engine does not take
        self.retracted = False
        self.deaf = False
        self.outcome: asyncio.Future[Reply | Fault] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Call {self.rid} {self.state} tokens={self.tokens}>"

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return list(self.body["input_ids"])

    @property
    def sampling(self) -> dict[str, Any]:
        """`sampling_params` as sent."""
        return dict(self.body.get("sampling_params") or {})

    @property
    def max_new_tokens(self) -> int:
        """The budget of this request, in tokens."""
        return int(self.sampling.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS)

    def spans(self) -> list[dict[str, Any]]:
        """The weight labels its tokens were made under."""
        ends = [start for _, start in self.labels[1:]] + [self.tokens]
        return [
            {"version": label, "start": start, "end": end}
            for (label, start), end in zip(self.labels, ends, strict=True)
            if end > start
        ]


class Core(Watched):
    """The engine behind the HTTP layer."""

    def __init__(self, *, slots: int | None = None, weight_version: str = DEFAULT_WEIGHT_VERSION) -> None:
        super().__init__()
        self.slots = slots
        self.answer: Callable[[Call], Reply | Fault | None] | None = None
        self.tokens_so_far: int | Callable[[Call], int] = 3
        self.lose_aborts: bool | Callable[[Call], bool] = False
        self.hold_aborts = False
        self.requests: list[Call] = []
        self.live: dict[str, Call] = {}
        self.paused: str | None = None
        self.draining = 0  # weight updates that wait for what runs; new calls are blocked behind them
        self.weight_version = weight_version
        self.released: set[str] = set()
        self.weights_lost = False
        self.spoilt = 0  # generations that ran on weights that were not there
        self.max_running = 0
        self.held_aborts: list[Call] = []
        self._filling = False

    def calls(self, state: State) -> list[Call]:
        """The live calls in that state, oldest first."""
        return [call for call in self.live.values() if call.state == state]

    @property
    def busy(self) -> bool:
        """Whether the scheduler holds anything."""
        return any(call.state != "blocked" for call in self.live.values())

    def submit(self, rid: str, body: dict[str, Any], headers: dict[str, str]) -> Call:
        """Accept a call and start it where that is possible."""
        call = Call(rid, body, headers)
        self.requests.append(call)
        self.live[rid] = call
        self.fill()
        return call

    def fill(self) -> None:
        """Let blocked calls in and start waiting ones, as far as pause and slots allow; rules answer at once."""
        if not self._filling:  # a rule that answers frees a slot: the loop below looks again
            self._filling = True
            try:
                while self._start_some():
                    pass
            finally:
                self._filling = False
        self.changed()

    def _start_some(self) -> bool:
        if self.paused is None and not self.draining:
            for call in self.calls("blocked"):
                call.state = "waiting"
        frozen = self.paused in {"retract", "in_place"} or bool(self.released)
        free = len(self.live) if self.slots is None else self.slots - len(self.calls("running"))
        started = [] if frozen else self.calls("waiting")[: max(free, 0)]
        for call in started:
            call.state, call.retracted = "running", False
        self.max_running = max(self.max_running, len(self.calls("running")))
        for call in started:
            if call.labels:
                continue
            call.labels.append((self.weight_version, 0))
            self.spoilt += self.weights_lost
            fate = self.answer(call) if self.answer is not None else None
            if fate is not None:
                self.finish(call, fate)
        return bool(started)

    def finish(self, call: Call, fate: Reply | Fault) -> None:
        """End a call; the first `Reset` or `Hang` ends only its HTTP side."""
        if call.state == "over":
            return
        if isinstance(fate, Reply):
            call.tokens = len(fate.ids(call.max_new_tokens))
        if isinstance(fate, Hang):
            call.deaf = True
        else:
            if not call.outcome.done():
                call.outcome.set_result(fate)
            if not isinstance(fate, Reset):
                self._leave(call)
        call.news.set()
        self.changed()

    def _leave(self, call: Call) -> None:
        call.state = "over"
        if self.live.get(call.rid) is call:
            del self.live[call.rid]
        self.fill()

    def drop(self, call: Call) -> None:
        """Forget a call whose client has gone: the engine noticed."""
        if call.state != "over":
            self._leave(call)
            call.outcome.cancel()
            call.news.set()  # whoever streams it finds it gone
        self.changed()

    def advance(self, call: Call, tokens: int) -> None:
        """Let a running call make that many tokens more."""
        call.tokens += tokens
        call.news.set()
        self.changed()

    def abort(self, rid: str = "", *, every: bool = False) -> None:
        """Do what `/abort_request` does: by prefix once the exact id is known, or all in the scheduler."""
        if every:
            targets = list(self.live.values())
        else:
            exact = self.live.get(rid)
            if exact is None or exact.abort_sent:
                return
            exact.abort_sent = True
            targets = [call for call in self.live.values() if call.rid.startswith(rid)]
        for call in sorted(targets, key=lambda call: call.state == "running"):  # the queue first, as the engine does
            lost = self.lose_aborts(call) if callable(self.lose_aborts) else self.lose_aborts
            if lost or call.deaf or call.state == "blocked":
                continue
            if self.hold_aborts:
                self.held_aborts.append(call)
            else:
                self._abort_now(call)
        self.changed()

    def settle_aborts(self) -> int:
        """Let the held aborts take effect; say how many."""
        held, self.held_aborts = self.held_aborts, []
        live = [call for call in held if call.state != "over"]
        for call in live:
            self._abort_now(call)
        return len(live)

    def _abort_now(self, call: Call) -> None:
        if call.state == "running" and self.paused == "in_place":
            call.abort_pending = True
            return
        finish: Finish = "abort" if call.state == "running" else "abort-queued"
        self.finish(call, Reply(tokens=self.partial(call), finish=finish))

    def partial(self, call: Call) -> int:
        """How many tokens an abort finds."""
        if call.tokens or (call.state != "running" and not call.retracted):
            return call.tokens
        said = self.tokens_so_far(call) if callable(self.tokens_so_far) else self.tokens_so_far
        return min(said, call.max_new_tokens)

    def pause(self, mode: str) -> None:
        """Stop starting things; `retract` puts what runs back in the queue, `abort` ends all in the scheduler.

        What an abort could not end in place ends when it is retracted: the queue takes aborts at once.
        """
        if mode == "abort":
            self.paused = self.paused or mode
            self.abort(every=True)
        else:
            self.paused = mode
        if mode == "retract":
            for call in self.calls("running"):
                call.state, call.retracted = "waiting", True
            self._settle_pending("waiting")
        self.changed()

    def resume(self) -> None:
        """Go on: pending aborts take effect, then blocked and waiting calls start."""
        self.paused = None
        self._settle_pending("running")
        self.fill()

    def _settle_pending(self, state: State) -> None:
        for call in self.calls(state):
            if call.abort_pending:
                call.abort_pending = False
                self._abort_now(call)

    def give_up(self, tags: list[str]) -> bool:
        """Give memory up; false where the scheduler dies of it."""
        if self.busy or self.released & set(tags):
            return False
        self.released |= set(tags)
        self.changed()
        return True

    def take_back(self, tags: list[str]) -> bool:
        """Take memory back; false where the scheduler dies of it."""
        if not self.released >= set(tags):
            return False
        self.released -= set(tags)
        self.fill()
        return True

    def set_version(self, label: str) -> None:
        """Give the weights a new label; what lives through it gets a new span."""
        self.weight_version = label
        for call in self.live.values():
            if call.labels and call.labels[-1][0] != label:
                call.labels.append((label, call.tokens))
        self.changed()

    def reset(self) -> None:
        """Lose everything, as a process that dies does."""
        for call in list(self.live.values()):
            call.state = "over"
            if not call.outcome.done():
                call.outcome.set_result(Reset())
            call.news.set()
        self.live.clear()
        self.held_aborts.clear()
        self.paused, self.draining, self.weight_version = None, 0, DEFAULT_WEIGHT_VERSION
        self.released, self.weights_lost = set(), False
        self.changed()
