"""Which judge process runs which call, and which of them is late: decisions only.

Invariants:

- A call is in one place: it waits, or stands in the line of one process. It leaves once: answered, lost or dropped.
- Only the first of a line runs. Its clock starts when it is first, so that nothing it waits for is counted.
- Quick calls are sent ahead, for a process that waits for its next call works less. Whoever stands behind one that
  turns out slow is called back and goes first again: nobody waits for another's timeout.
- A process that ends takes the call it ran with it, and no other; one that ends between two calls takes none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rollout_svc.judging.values import CallClock

__all__ = ["AHEAD", "QUICK_S", "SLOW_S", "Job", "Lines", "Seat"]

AHEAD: Final = 16
"""Quick calls in the line of one process: what it does while the loop is busy."""
QUICK_S: Final = 0.003
"""Seconds a judger takes by habit for its calls to be sent ahead."""
SLOW_S: Final = 0.05
"""Seconds after which those behind a call are called back."""
_HABIT: Final = 0.2  # weight of the newest call in a judger's habit
_HABITS: Final = 256  # judgers remembered


@dataclass(eq=False, slots=True)
class Job:
    """A call: what it is, and when it was begun."""

    number: int
    key: bytes
    """Which judger: calls of one key are expected to take equally long."""
    frame: bytes
    timeout_s: float
    clock: CallClock = field(default_factory=CallClock)
    recalled: bool = False
    """Nobody waits for it here any more: a process that was sent it says that it skipped it, or ran it for nobody."""

    @property
    def begun(self) -> float | None:
        """When it was first in its line; None before."""
        return self.clock.begun


@dataclass(eq=False, slots=True)
class Seat:
    """A process that takes calls, and the calls it was sent, in order."""

    line: deque[Job] = field(default_factory=deque)

    @property
    def late_at(self) -> float | None:
        """When the call that runs is out of time; None where none runs."""
        if not self.line or self.line[0].begun is None:
            return None
        return self.line[0].begun + self.line[0].timeout_s


class Lines:
    """Calls that wait, and processes with their lines."""

    __slots__ = ("_habits", "seats", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.seats: dict[Seat, None] = {}
        self._habits: dict[bytes, float] = {}

    def assign(self, now: float) -> list[tuple[Seat, Job]]:
        """Put calls that wait into lines; returns what is to be sent where, in order."""
        sent: list[tuple[Seat, Job]] = []
        while self.waiting:
            job = self.waiting[0]
            if job.recalled:  # dropped while it waited
                self.waiting.popleft()
                continue
            room = [seat for seat in self.seats if len(seat.line) < self._depth(seat, job, now)]
            if not room:
                break
            seat = min(room, key=lambda seat: len(seat.line))
            self.waiting.popleft()
            seat.line.append(job)
            if len(seat.line) == 1:
                job.clock.begun = now
            sent.append((seat, job))
        return sent

    def answered(self, seat: Seat, number: int, now: float, run_s: float | None) -> Job | None:
        """Take the first of a line, which was answered, out of it; the next one begins.

        Returns:
            The call; None where its process spoke out of turn.
        """
        if not seat.line or seat.line[0].number != number:
            return None
        job = seat.line.popleft()
        if seat.line:
            seat.line[0].clock.begun = now
        if run_s is not None:
            job.clock.run_s = run_s
            before = self._habits.pop(job.key, run_s)
            self._habits[job.key] = before + _HABIT * (run_s - before)
            if len(self._habits) > _HABITS:
                del self._habits[next(iter(self._habits))]
        return job

    def late(self, now: float) -> list[Seat]:
        """Processes whose call is out of time."""
        return [seat for seat in self.seats if seat.late_at is not None and seat.late_at <= now]

    def call_back(self, now: float) -> list[tuple[Seat, Job]]:
        """Take those behind slow calls back, to go first again; returns what each process has to be told to skip."""
        back: list[tuple[Seat, Job]] = []
        for seat in self.seats:
            if len(seat.line) > 1 and (begun := seat.line[0].begun) is not None and now - begun >= SLOW_S:
                back += [(seat, job) for job in seat.line if job is not seat.line[0] and not job.recalled]
        for seat, job in reversed(back):
            self.waiting.appendleft(self._copy(seat, job))
        return back

    def look_at(self) -> float | None:
        """When to look again for late and slow calls; None while nothing runs."""
        times = []
        for seat in self.seats:
            if seat.late_at is not None:
                behind = any(not job.recalled for job in seat.line if job is not seat.line[0])
                slow_at = (seat.line[0].begun or 0.0) + SLOW_S if behind else seat.late_at
                times.append(min(seat.late_at, slow_at))
        return min(times, default=None)

    def leave(self, seat: Seat) -> Job | None:
        """Take a process away; those behind its first go first again.

        Returns:
            The call it ran; None where it ran none, or one that was taken back.
        """
        self.seats.pop(seat, None)
        first = seat.line.popleft() if seat.line else None
        self.give_back(seat)
        return None if first is None or first.recalled else first

    def give_back(self, seat: Seat) -> None:
        """Have those that stand in the line of a process, which will begin none of them, go first again."""
        if seat.line:
            seat.line[0].clock.begun = None
        while seat.line:
            job = seat.line.pop()
            if not job.recalled:
                self.waiting.appendleft(job)

    def drop(self, job: Job) -> Seat | None:
        """Forget a call that nobody waits for any more.

        Returns:
            The process that runs it, and is to be ended; None where none does.
        """
        for seat in self.seats:
            if job in seat.line:
                if seat.line[0] is job:
                    return seat
                break
        job.recalled = True
        return None

    def _depth(self, seat: Seat, job: Job, now: float) -> int:
        """Calls that a line may hold, this one included."""
        if not seat.line:
            return 1
        first = seat.line[0]
        if first.begun is not None and now - first.begun >= SLOW_S:
            return 1
        quick = all(self._habits.get(key, QUICK_S) < QUICK_S for key in (first.key, job.key))
        return AHEAD if quick else 1

    @staticmethod
    def _copy(seat: Seat, job: Job) -> Job:
        """Leave a mark in the line for the answer that will come, and return the call itself to wait again."""
        mark = Job(job.number, job.key, b"", job.timeout_s, recalled=True)
        seat.line[seat.line.index(job)] = mark
        job.clock.begun = None
        return job
