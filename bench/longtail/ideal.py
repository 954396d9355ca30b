"""What the trace allows: a list scheduler under the same bounds, that loses no time to anything.

It has the cell's slots, the admission window of `disaggregated` and the bound on staleness, and nothing else: whenever
a slot is free it starts the next sample of the oldest group, and when there is none, the next prompt, at that very
moment and not before; nothing it runs is ever cut by an update; what must expire is ended at once.

Invariants:

- Groups out (admitted, neither handed over nor expired) are at most `room * batch`, with
  `room = min(S + 1, S + v - next + 1)`: the batches that tokens made now can still serve.
- A group is handed over at a step at most S after the version of its first token, unless nothing is to expire.
- Pure: no clock but its own, and no randomness.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.longtail.outcome import HandOver, Outcome, outcome, warm_up
from bench.longtail.trace import GROUP_SIZE, TOKEN_S, Trace

__all__ = ["ideal", "littles_law"]


@dataclass(slots=True, eq=False)
class _Group:
    """A group that is out."""

    prompt: int
    version: int
    left: int = GROUP_SIZE
    running: int = 0
    expired: bool = False


@dataclass(slots=True)
class _Stage:
    """The scheduler's state."""

    trace: Trace
    slots: int
    batch: int
    staleness: int
    train_s: float
    expiring: bool = True
    now: float = 0.0
    version: int = 0
    step: int = 0  # of the next hand-over
    training_until: float | None = None
    free: int = 0
    busy_s: float = 0.0
    dry_at_s: float = 0.0
    source: Iterator[int] = field(default_factory=lambda: iter(()))
    peeked: int | None = None
    waiting: deque[tuple[_Group, int]] = field(default_factory=deque)
    ends: list[tuple[float, int, _Group]] = field(default_factory=list)
    out: list[_Group] = field(default_factory=list)
    ready: list[_Group] = field(default_factory=list)
    hand_overs: list[HandOver] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    started: int = 0

    def run(self) -> Outcome:
        """Until nothing is left that a whole batch could be made of, and then the rest as one."""
        self.free = self.slots
        self.source = iter(range(len(self.trace.tokens)))
        self.peeked = next(self.source, None)
        while True:
            while self._hand_over():
                pass
            self._fill()
            if not self._advance():
                break
        self.trained += [group.prompt for group in self.ready]
        return outcome(
            self.trace,
            self.slots,
            self.hand_overs,
            self.trained,
            warm=warm_up(self.staleness),
            dry_at_s=self.dry_at_s,
            busy_s=self.busy_s,
        )

    @property
    def _room(self) -> int:
        return max(0, min(self.staleness + 1, self.staleness + self.version - self.step + 1)) * self.batch

    def _fill(self) -> None:
        while self.free:
            while self.waiting and self.waiting[0][0].expired:
                self.waiting.popleft()
            if not self.waiting:
                if self.peeked is None or len(self.out) >= self._room:
                    return
                group = _Group(self.peeked, self.version)
                self.out.append(group)
                self.waiting.extend((group, tokens) for tokens in self.trace.tokens[self.peeked])
                self.peeked = next(self.source, None)
                if self.peeked is None:
                    self.dry_at_s = self.now
            group, tokens = self.waiting.popleft()
            self.started += 1
            self.free -= 1
            group.running += 1
            heapq.heappush(self.ends, (self.now + tokens * TOKEN_S, self.started, group))

    def _advance(self) -> bool:
        """Let time pass to the next thing that happens; false where nothing will."""
        while self.ends and self.ends[0][2].expired:
            heapq.heappop(self.ends)
        moments = [self.ends[0][0]] if self.ends else []
        moments += [] if self.training_until is None else [self.training_until]
        if not moments:
            return False
        self.busy_s += (self.slots - self.free) * (min(moments) - self.now)
        self.now = min(moments)
        if self.training_until == self.now:
            self.training_until = None
            self.version += 1
        else:
            group = heapq.heappop(self.ends)[2]
            self.free += 1
            group.running -= 1
            group.left -= 1
            if group.left == 0:
                self.ready.append(group)
        return True

    def _hand_over(self) -> bool:
        if self.training_until is not None or len(self.ready) < self.batch:
            return False
        self.ready.sort(key=lambda group: group.version)  # stable: by version, then by when they were ready
        self._expire([group for group in self.ready if self._is_stale(group)])
        if len(self.ready) < self.batch:
            return False
        leased, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        gone = set(leased)
        self.out = [group for group in self.out if group not in gone]
        self.hand_overs.append(HandOver(self.now, self.busy_s))
        self.trained += [group.prompt for group in leased]
        self.training_until = self.now + self.train_s
        self.step += 1
        self._expire([group for group in self.out if group.left and self._is_stale(group)])
        return True

    def _is_stale(self, group: _Group) -> bool:
        return self.expiring and group.version + self.staleness < self.step

    def _expire(self, groups: list[_Group]) -> None:
        gone = set(groups)
        for group in groups:
            group.expired = True
            self.free += group.running
        self.out = [group for group in self.out if group not in gone]
        self.ready = [group for group in self.ready if group not in gone]


def ideal(trace: Trace, slots: int, batch: int, staleness: int, train_s: float, *, expiring: bool = True) -> Outcome:
    """Play a cell of `disaggregated+partial` as well as its bounds allow.

    Args:
        trace: what is to be done.
        slots: of the engine.
        batch: groups of a batch.
        staleness: S.
        train_s: how long the trainer trains on a batch, while generation goes on.
        expiring: false: S bounds the window alone, and a group may be as old as it likes when it is handed over.
    """
    return _Stage(trace, slots, batch, staleness, train_s, expiring).run()


def littles_law(trace: Trace, slots: int, batch: int, staleness: int) -> float:
    """The share of slots that a window of S + 1 batches can keep busy, roughly: for people to hold the figure against.

    By Little's law, groups under way = groups a second * seconds a group is under way. A group whose members all start
    at once is under way for its longest, and uses `8 * mean / longest` slots on average. Of the window, half a batch is
    ready and waits for the other half: `use = min(1, ((S + 1) * B - B / 2) * 8 * mean / (slots * longest))`.
    """
    window = (staleness + 1) * batch - batch / 2
    return min(1.0, window * GROUP_SIZE * trace.mean_tokens / (slots * trace.mean_longest_tokens))
