"""Which judge process runs which call: nothing lost, nothing run for two, nobody charged for waiting."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.judging.processes.lines import AHEAD, SLOW_S, Job, Lines, Seat

TIMEOUT_S = 1.0
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "answer", "slow_answer", "die", "spent", "drop", "wait", "slow_wait", "seat"]),
        st.integers(0, 7),
    ),
    max_size=80,
)


class House:
    """Lines, and processes that do as they should: they run what they were sent in order, less what was taken back."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.now = 0.0
        self.numbers = 0
        self.open: dict[int, Job] = {}
        self.ended: list[int] = []
        self.first_at: dict[int, float] = {}

    def add(self) -> None:
        self.numbers += 1
        job = Job(self.numbers, b"j", b"", TIMEOUT_S)
        self.open[job.number] = job
        self.lines.waiting.append(job)

    def end(self, job: Job | None) -> None:
        if job is not None and not job.recalled:
            self.ended.append(job.number)
            del self.open[job.number]

    def answer(self, seat: Seat, run_s: float) -> None:
        if seat.line:
            skipped = seat.line[0].recalled
            self.end(self.lines.answered(seat, seat.line[0].number, self.now, None if skipped else run_s))

    def check(self) -> None:
        standing = [job for seat in self.lines.seats for job in seat.line if not job.recalled]
        waiting = [job for job in self.lines.waiting if not job.recalled]
        places = [job.number for job in (*standing, *waiting)]
        assert sorted(places) == sorted(self.open)  # each in one place
        assert all(len(seat.line) <= AHEAD for seat in self.lines.seats)
        for seat in self.lines.seats:
            assert all(job.begun is None for job in list(seat.line)[1:])
        if waiting:
            assert all(seat.line for seat in self.lines.seats)  # none is idle while a call waits

    def step(self, what: str, which: int) -> None:
        seats = list(self.lines.seats)
        seat = seats[which % len(seats)] if seats else None
        if what == "add":
            self.add()
        elif what == "seat" and len(seats) < 3:
            self.lines.seats[Seat()] = None
        elif what in {"answer", "slow_answer"} and seat is not None:
            self.answer(seat, 0.0001 if what == "answer" else 0.5)
        elif what == "die" and seat is not None:
            self.end(self.lines.leave(seat))
        elif what == "spent" and seat is not None:
            self.lines.give_back(seat)
            assert self.lines.leave(seat) is None
        elif what == "drop" and self.open:
            number = sorted(self.open)[which % len(self.open)]
            job = self.open.pop(number)
            running = self.lines.drop(job)
            if running is not None:
                assert self.lines.leave(running) is job
        elif what in {"wait", "slow_wait"}:
            self.now += 0.001 if what == "wait" else SLOW_S
            for late in self.lines.late(self.now):
                self.end(self.lines.leave(late))
            self.lines.call_back(self.now)
        self.lines.assign(self.now)
        self.check()


@given(STEPS)
def test_every_call_is_in_one_place_and_ends_once(steps: list[tuple[str, int]]) -> None:
    """Whatever answers, hangs, dies or is dropped: at the end nothing is left, and nothing ended twice."""  # P21
    house = House()
    for what, which in steps:
        house.step(what, which)
    house.lines.seats.setdefault(Seat())
    for _ in range(10 * house.numbers + 10):
        house.lines.assign(house.now)
        for seat in tuple(house.lines.seats):
            house.answer(seat, 0.0001)
    assert not house.open
    assert len(house.ended) == len(set(house.ended))


def quick(seats: int) -> tuple[Lines, list[Seat]]:
    """Lines in which the calls of `j` are known to be quick."""
    lines, made = Lines(), [Seat() for _ in range(seats)]
    lines.seats.update(dict.fromkeys(made))
    lines.waiting.append(Job(0, b"j", b"", TIMEOUT_S))
    lines.assign(0.0)
    lines.answered(made[0], 0, 0.0, 0.0001)
    return lines, made


def jobs(count: int) -> list[Job]:
    return [Job(number, b"j", b"", TIMEOUT_S) for number in range(1, count + 1)]


def test_quick_calls_are_sent_ahead_and_others_are_not() -> None:
    """A judger nobody knows yet, or a slow one, has one call in a process at a time."""
    lines, [seat] = quick(1)
    lines.waiting.extend(jobs(3))
    assert len(lines.assign(0.0)) == 3
    other = Lines()
    other.seats[seat_of_other := Seat()] = None
    other.waiting.extend(jobs(3))
    assert len(other.assign(0.0)) == 1
    other.answered(seat_of_other, 1, 1.0, 0.9)
    assert len(other.assign(1.0)) == 1
    assert len(seat.line) == 3


def test_nobody_waits_for_a_neighbour_that_hangs() -> None:
    """Those behind a call that turns out slow are called back, and run in another process meanwhile."""  # P21
    lines, [one, other] = quick(2)
    hung, *rest = jobs(6)
    lines.waiting.extend([hung, *rest])
    lines.assign(0.0)
    assert one.line[0] is hung
    behind = list(one.line)[1:]
    assert behind
    while other.line:
        lines.answered(other, other.line[0].number, 0.01, 0.0001)
    assert lines.look_at() == SLOW_S
    back = lines.call_back(SLOW_S)
    assert [job.number for _, job in back] == [job.number for job in behind]
    sent = lines.assign(SLOW_S)
    assert [(seat, job) for seat, job in sent] == [(other, job) for job in behind]
    assert lines.look_at() == 2 * SLOW_S  # now the first of the others has as long
    assert lines.late(TIMEOUT_S - 0.001) == []
    assert lines.late(TIMEOUT_S)[0] is one
    assert lines.leave(one) is hung
    assert not lines.waiting


def test_the_clock_of_a_call_starts_when_it_is_first() -> None:
    """One that waited in line for most of a second has its whole timeout left."""  # P21
    lines, [seat] = quick(1)
    first, second = jobs(2)
    lines.waiting.extend([first, second])
    lines.assign(0.0)
    assert (first.begun, second.begun) == (0.0, None)
    lines.answered(seat, first.number, 0.9, 0.9)
    assert second.begun == 0.9
    assert seat.late_at == 0.9 + TIMEOUT_S
