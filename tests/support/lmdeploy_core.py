"""The life of generations inside a faked LMDeploy server: sessions, handles, epochs, sleep. No I/O and no clock.

- A call waits for one of the handles (`slots`), runs, or is over; over is final and happens once.
- The caller's id is known to the maps from the start to the end of a call, to its abort by id, or to an `abort_all`
  that finds it waiting, whichever is first; what is in no map cannot be aborted by id any more.
- An abort by id of a call that waits does nothing else: it runs to its end later, and is not found any more.
- `abort_all` raises the epoch: what waits ends, without a token, when a handle comes free.
- There is no weight label. `weights` is what the tests know, and each call its truth in `made_under`.
- Nothing ends by itself: a call ends by `finish`, by an abort, or by `reset`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from tests.support.faults import Fault, Hang, Reset
from tests.support.lmdeploy_wire import budget
from tests.support.sglang_wire import Reply
from tests.support.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ANONYMOUS", "Call", "Core"]

ANONYMOUS = -1
"""`session_id` of a call that does not care."""
TAGS = frozenset({"weights", "kv_cache"})
"""What sleeps, and is woken."""

State = Literal["waiting", "running", "over"]


class Call:
    """One `/generate` call that the server accepted."""

    __slots__ = (
        "body", "deaf", "epoch", "headers", "made_under", "news", "number", "outcome", "session_id", "state", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, body: dict[str, Any], headers: dict[str, str], epoch: int) -> None:
        self.number = number
        self.session_id = int(body.get("session_id", ANONYMOUS))
        self.body = body
        self.headers = headers
        self.epoch = epoch
        self.state: State = "waiting"
        self.tokens = 0  # generated so far, where a test says so by `advance`
        self.made_under: list[tuple[int, int]] = []  # (weights, first token made under them)
        self.deaf = False
        self.outcome: asyncio.Future[Reply | Fault] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Call {self.session_id} {self.state} tokens={self.tokens}>"

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return list(self.body["input_ids"])

    @property
    def max_tokens(self) -> int:
        """The budget of this request, in tokens."""
        return budget(self.body)


class Core(Watched):
    """The engine behind the HTTP layer; mixed into its face."""

    def __init__(self, *, slots: int | None = None) -> None:
        super().__init__()
        self.slots = slots
        self.answer: Callable[[Call], Reply | Fault | None] | None = None
        self.tokens_so_far: int | Callable[[Call], int] = 3
        self.lose_aborts: bool | Callable[[Call], bool] = False
        self.hold_aborts = False
        self.requests: list[Call] = []
        self.live: dict[int, Call] = {}
        self.sessions: dict[int, Call] = {}
        self.session_ids: dict[int, int] = {}  # the caller's -> its own
        self.epoch = 0
        self.asleep: set[str] = set()
        self.weights = 0
        self.weights_lost = False  # after a sleep of level 2, until others are put in
        self.spoilt = 0  # generations that ran without weights
        self.max_running = 0
        self.held_aborts: list[Call] = []
        self._numbers = 0
        self._filling = False

    def calls(self, state: State) -> list[Call]:
        """The live calls in that state, oldest first."""
        return [call for call in self.live.values() if call.state == state]

    @property
    def running(self) -> int:
        """Calls that have a handle, heard or not."""
        return len(self.calls("running"))

    @property
    def waiting(self) -> int:
        """Calls that wait for a handle."""
        return len(self.calls("waiting"))

    def known(self, session_id: int) -> bool:
        """Whether an abort by that id would find its call."""
        return session_id in self.session_ids

    def submit(self, body: dict[str, Any], headers: dict[str, str]) -> Call | None:
        """Accept a call and start it where a handle is free; None for an id that is known: the server fails there."""
        session_id = int(body.get("session_id", ANONYMOUS))
        if self.known(session_id):
            return None
        call = Call(self._numbers, body, headers, self.epoch)
        self._numbers += 1
        self.requests.append(call)
        self.live[call.number] = self.sessions[call.number] = call
        if session_id != ANONYMOUS:
            self.session_ids[session_id] = call.number
        self.fill()
        return call

    def fill(self) -> None:
        """Give free handles to those who wait; rules answer at once."""
        if not self._filling:  # a rule that answers frees a handle: the loop below looks again
            self._filling = True
            try:
                while self._start_one():
                    pass
            finally:
                self._filling = False
        self.changed()

    def _start_one(self) -> bool:
        waiting = self.calls("waiting")
        if not waiting or (self.slots is not None and self.running >= self.slots):
            return False
        call = waiting[0]
        call.state = "running"
        if call.epoch != self.epoch:
            self.finish(call, Reply(tokens=0, finish="abort"))
            return True
        self.max_running = max(self.max_running, self.running)
        call.made_under.append((self.weights, 0))
        self.spoilt += self.weights_lost
        fate = self.answer(call) if self.answer is not None else None
        if fate is not None:
            self.finish(call, fate)
        return True

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
        self.changed()

    def _leave(self, call: Call) -> None:
        call.state = "over"
        self.live.pop(call.number, None)
        self._forget(call)
        self.fill()

    def _forget(self, call: Call) -> None:
        self.sessions.pop(call.number, None)
        if self.session_ids.get(call.session_id) == call.number:
            del self.session_ids[call.session_id]

    def drop(self, call: Call) -> None:
        """Cancel a call whose client has gone: the server noticed, and its session is free."""
        if call.state != "over":
            self._leave(call)
            call.outcome.cancel()
            call.news.set()
        self.changed()

    def advance(self, call: Call, tokens: int) -> None:
        """Let a running call make that many tokens more."""
        call.tokens += tokens
        call.news.set()
        self.changed()

    def abort(self, session_id: int) -> bool:
        """Do what an abort by id does; false where nobody of that id is known."""
        number = self.session_ids.get(session_id)
        call = None if number is None else self.sessions.get(number)
        if call is None:
            return False
        self._forget(call)  # in any case, running or not: it is not found again
        if call.state == "running":
            self._cancel(call)
        self.changed()
        return True

    def abort_all(self) -> None:
        """Do what `abort_all` does."""
        self.epoch += 1
        for call in self.calls("waiting"):
            self._forget(call)
        for call in self.calls("running"):
            self._cancel(call)
        self.changed()

    def _cancel(self, call: Call) -> None:
        lost = self.lose_aborts(call) if callable(self.lose_aborts) else self.lose_aborts
        if lost or call.deaf:
            return
        if self.hold_aborts:
            self.held_aborts.append(call)
        else:
            self.finish(call, Reply(tokens=self.partial(call), finish="abort"))

    def settle_aborts(self) -> int:
        """Let the held aborts take effect; say how many."""
        held, self.held_aborts = self.held_aborts, []
        live = [call for call in held if call.state != "over"]
        for call in live:
            self.finish(call, Reply(tokens=self.partial(call), finish="abort"))
        return len(live)

    def partial(self, call: Call) -> int:
        """How many tokens an abort finds."""
        if call.tokens:
            return call.tokens
        said = self.tokens_so_far(call) if callable(self.tokens_so_far) else self.tokens_so_far
        return min(said, call.max_tokens)

    def sleep(self, level: int = 1) -> None:
        """Abort everything and sleep, weights and cache; at level 2 the weights are not kept."""
        self.asleep = set(TAGS)
        self.weights_lost |= level > 1
        self.abort_all()

    def wake(self, tags: list[str]) -> None:
        """Wake what is named, or all; names nobody knows are ignored."""
        self.asleep -= set(tags) or TAGS
        self.changed()

    def load(self, weights: int) -> None:
        """Put other weights in, as a trainer does; what lives through it is mixed."""
        self.weights, self.weights_lost = weights, False
        for call in self.calls("running"):
            call.made_under.append((weights, call.tokens))
        self.changed()

    def reset(self) -> None:
        """Lose everything, as a process that dies does; it comes back with the weights of its start."""
        for call in list(self.live.values()):
            call.state = "over"
            if not call.outcome.done():
                call.outcome.set_result(Reset())
            call.news.set()
        for table in (self.live, self.sessions, self.session_ids):
            table.clear()
        self.held_aborts.clear()
        self.asleep.clear()
        self.weights_lost = False
        self.epoch = self._numbers = self.weights = 0
        self.changed()
