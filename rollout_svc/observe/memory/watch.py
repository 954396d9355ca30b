"""Notices what grows with the steps, and names the account that it is.

Accounts are bytes by name. Some are parts of others (a handle's tensor lies in the heap, the heap in the resident
memory), so growth is followed downwards: the part that grows by at least half as much is to blame for its whole, and
what no part explains is `unaccounted`.

Invariants:

- Pure: no clock, no I/O; the same records give the same answers.
- A leak is said once, again whenever it has doubled, and its end is said once: when it grows by less than a quarter of
  what it grew by at first, over a whole window.
- Nothing is said before a whole window was seen, nor of what was as high before: a saw-tooth's second tooth is no news.
  A single spike, as at the start, hides nothing.
- Two steps in a row have to agree, so that one odd window is not enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rollout_svc.observe.memory.shape import Booleans, Floats, Places, condense, rises

__all__ = ["RSS", "UNACCOUNTED", "Account", "Growth", "MemoryWatch", "News"]

RSS: Final = "rss"
UNACCOUNTED: Final = "unaccounted"
"""What is resident and in none of the accounts: libraries, stacks, allocators other than malloc."""
FLOOR_BYTES: Final = 2**20
"""Growth over a window that is not worth a word: 50 KB a step at the default window."""
_INSIDE: Final = {
    "python_heap": RSS,
    "malloc_free": RSS,
    "shared_memory": RSS,
    UNACCOUNTED: RSS,
    "torch_cpu": "python_heap",
    "fetch_buffers": "python_heap",
    "replay_buffer": "python_heap",
    "in_flight": "python_heap",
}
"""What each account is a part of; handles are where their store is."""
_STORES: Final = {"memory": "python_heap", "shared": "shared_memory", "ray": "ray_store"}
_BLAMED: Final = 0.5  # of the growth of a whole that a part has to have
_SLACK: Final = 0.5  # of the growth that is warned about: noise hides as much
_HIGHS: Final = 5  # windows before the present one in which it may not have been as high, but for one leap
_SMOOTH: Final = 5  # values whose median stands for a level, at most; a quarter of a window
_AGREE: Final = 2  # steps in a row
_ENDED: Final = 0.25  # of the slope it had when it was said


@dataclass(frozen=True, slots=True)
class Growth:
    """An account that grows with the steps.

    Attributes:
        process: whose it is.
        account: which; `unaccounted` where resident memory grows and no account with it.
        bytes_per_step: how fast, over the last window.
        bytes: what it has now.
        grown_bytes: since `since_step`.
        since_step: the trainer's step at which it began, as far as that can be told.
        of_rss: its share of the growth of resident memory; None: that does not grow, or it is no part of that.
        again: whether it was said before, at half of this or less.
    """

    process: str
    account: str
    bytes_per_step: float
    bytes: int
    grown_bytes: int
    since_step: int
    of_rss: float | None
    again: bool

    def as_json(self) -> dict[str, Any]:
        """The record of one that grows."""
        return {
            "process": self.process,
            "account": self.account,
            "bytes_per_step": round(self.bytes_per_step),
            "bytes": self.bytes,
            "grown_bytes": self.grown_bytes,
            "since_step": self.since_step,
            "of_rss": None if self.of_rss is None else round(self.of_rss, 3),
        }


@dataclass(frozen=True, slots=True)
class News:
    """What a record has changed: leaks to be said, and those that ended."""

    growing: tuple[Growth, ...] = ()
    ended: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """One account: bytes now, at the first step, and its slope over the last window (None: too early to say)."""

    bytes: int
    first_bytes: int
    bytes_per_step: float | None


@dataclass(slots=True)
class _Said:
    """A leak that was said: as it was at first, as it is now, and its growth when it was last said."""

    first: Growth
    last: Growth
    base: float
    told: float


@dataclass(slots=True)
class _Series:
    """What is known of one process.

    Attributes:
        names: row of each account in the arrays.
        now, first: latest values, also between steps; those of the first step.
        values: the last window, the latest at the right; shape (accounts, window).
        climbed: what was reached by growth that looked like a leak, in the last window and those of `highs`.
        highs: levels of the windows before; shape (accounts, `_HIGHS` windows).
        slopes: bytes a step.
        agreed: for how many steps in a row each account has looked like a leak.
    """

    window: int
    names: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    steps: deque[int] = field(default_factory=deque)
    seen: int = 0
    values: Floats = field(init=False)
    climbed: Booleans = field(init=False)
    highs: Floats = field(init=False)
    slopes: Floats = field(init=False)
    agreed: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    said: dict[str, _Said] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = np.zeros((0, self.window))
        self.climbed = np.zeros((0, self.window * (_HIGHS + 1)), dtype=np.bool_)
        self.highs = np.full((0, self.window * _HIGHS), -np.inf)
        self.slopes = np.zeros(0)
        self.agreed = np.zeros(0, dtype=np.int64)

    @property
    def smooth(self) -> int:
        return min(_SMOOTH, self.window // 4)

    @property
    def full(self) -> bool:
        return self.seen >= self.window

    def push(self, step: int, accounts: Mapping[str, int]) -> None:
        """Add the values of a step; an account that is new had nothing before, one that is missing has nothing now."""
        new = [name for name in accounts if name not in self.names]
        if new:
            self.names |= {name: len(self.names) + place for place, name in enumerate(new)}
            self.values = np.vstack([self.values, np.zeros((len(new), self.window))])
            self.climbed = np.vstack([self.climbed, np.zeros((len(new), self.climbed.shape[1]), dtype=np.bool_)])
            self.highs = np.vstack([self.highs, np.full((len(new), self.highs.shape[1]), -np.inf)])
            self.slopes = np.concatenate([self.slopes, np.zeros(len(new))])
            self.agreed = np.concatenate([self.agreed, np.zeros(len(new), dtype=np.int64)])
        if self.full:
            self.highs[:, :-1] = self.highs[:, 1:]
            self.highs[:, -1] = np.median(self.values[:, : self.smooth], axis=1)
            self.climbed[:, :-1] = self.climbed[:, 1:]
            self.climbed[:, -1] = False
        self.values[:, :-1] = self.values[:, 1:]
        self.values[:, -1] = [accounts.get(name, 0) for name in self.names]
        self.steps.append(step)
        if len(self.steps) > self.window:
            self.steps.popleft()
        if not self.seen:
            self.first = dict(accounts)
        self.seen += 1

    def climbs(self, steady: Booleans, start: Places) -> None:
        """Note what of the window was reached by growth: from where it began, of the accounts that rise like a leak."""
        self.climbed[:, -self.window :] |= steady[:, None] & (np.arange(self.window) >= start[:, None])

    def been_at(self, now: Floats, base: Floats, enough: float) -> Booleans:
        """Whether each account was at a level in the windows before: by growth, or as it moves up and down by itself.

        A single time above the base is not counted where it went up and down by leaps, hardly ever between, and twice
        as high as the growth in question: a start, a checkpoint. What is passed soon may be waited for.

        Args:
            now: levels.
            base: levels that the growth began at.
            enough: fraction that tells two levels apart.
        """
        there = self.highs * (1 + enough) > now[:, None]
        above = there | (self.highs > base[:, None] * (1 + enough / 2))
        times = above[:, 0] + np.sum(above[:, 1:] & ~above[:, :-1], axis=1)
        lag = self.smooth // 2  # each high is the median of as many values on both sides of it
        grown = there & self.climbed[:, lag : lag + there.shape[1]]
        between = (above & ~there).sum(axis=1) > self.smooth
        low = self.highs.max(axis=1) < now + (now - base)
        been: Booleans = there.any(axis=1) & ((times > 1) | between | low | grown.any(axis=1))
        return been

    def level(self, row: int) -> float:
        """What an account has now, but for a single wild value."""
        return float(np.median(self.values[row, -self.smooth :]))


class MemoryWatch:
    """Takes one record per step and process; see the module's invariants."""

    def __init__(self, *, window_steps: int = 20, growth: float = 0.01, store: str = "memory") -> None:
        """Begin.

        Args:
            window_steps: steps a growth is measured over, at least 5.
            growth: growth of one step, as a fraction, that is found within a window of steps.
            store: where handles' tensors lie: `memory`, `shared` or `ray`.
        """
        self.window_steps = window_steps
        self.growth = growth
        self._handles_in = _STORES[store]
        self._processes: dict[str, _Series] = {}

    def __repr__(self) -> str:
        return f"<MemoryWatch {self.verdict}>"

    # -- taking ----------------------------------------------------------------------------------------------

    def look(self, process: str, accounts: Mapping[str, int]) -> None:
        """Take note of what a process has between two steps; no slope changes."""
        self._series(process).now = _whole(accounts)

    def record(self, step: int, process: str, accounts: Mapping[str, int]) -> News:
        """Take what a process has at a step, bytes by account, and say what is new about it."""
        series, whole = self._series(process), _whole(accounts)
        series.now = whole
        series.push(step, whole)
        if not series.full:
            return News()
        suspects, start = self._suspects(series)
        return self._judge(process, series, suspects, start)

    def forget(self, process: str) -> None:
        """A process is not there any more, or is another one: what was known of it goes."""
        self._processes.pop(process, None)

    def _series(self, process: str) -> _Series:
        series = self._processes.get(process)
        if series is None:
            series = self._processes[process] = _Series(self.window_steps)
        return series

    # -- judging ---------------------------------------------------------------------------------------------

    def _suspects(self, series: _Series) -> tuple[list[str], dict[str, int]]:
        """Accounts that rise like a leak; and for each account the place in the window at which it began."""
        points, size = condense(series.values)
        found = rises(points)
        series.slopes = found.slope / (size * _gap(series.steps))
        rise = found.slope * points.shape[1]  # over the window
        level = np.maximum(np.median(points[:, : max(1, points.shape[1] // 4)], axis=1), 1.0)
        enough = self._enough
        series.climbs(found.steady, found.start * size)
        now = np.median(series.values[:, -series.smooth :], axis=1)
        suspect = found.steady & ~series.been_at(now, level, enough) & (rise >= np.maximum(level * enough, FLOOR_BYTES))
        series.agreed = np.where(suspect, series.agreed + 1, 0)
        names = [name for name, row in series.names.items() if series.agreed[row] >= _AGREE and name != UNACCOUNTED]
        return names, {name: int(found.start[row]) * size for name, row in series.names.items()}

    @property
    def _enough(self) -> float:
        """Growth over a window, as a fraction, that counts."""
        return _SLACK * self.growth * self.window_steps

    def _judge(self, process: str, series: _Series, suspects: Iterable[str], start: Mapping[str, int]) -> News:
        rss = self._slope(series, RSS)
        causes = {self._cause(series, name): name for name in suspects}
        growing, ended = [], []
        for account, said in list(series.said.items()):
            said.last = self._growth(process, series, account, said, rss)
            if said.last.bytes_per_step < _ENDED * said.first.bytes_per_step:
                del series.said[account]
                ended.append(said.last)
            elif said.last.grown_bytes >= 2 * said.told:
                said.told = said.last.grown_bytes
                growing.append(said.last)
        for account, through in causes.items():
            if account not in series.said and account not in {end.account for end in ended}:
                growing.append(self._first(process, series, account, start[through], rss))
        return News(tuple(growing), tuple(ended))

    def _first(self, process: str, series: _Series, account: str, start: int, rss: float) -> Growth:
        """Begin to tell of an account."""
        row = series.names[account]
        base = float(np.median(series.values[row, max(0, start - 2) : start + 3]))
        since = series.steps[min(start, len(series.steps) - 1)]
        slope, now = float(series.slopes[row]), series.level(row)
        grown = max(0, round(now - base))
        growth = Growth(
            process, account, slope, round(now), grown, since, self._share(account, slope, rss), again=False
        )
        series.said[account] = _Said(growth, growth, base, max(1.0, grown))
        return growth

    def _growth(self, process: str, series: _Series, account: str, said: _Said, rss: float) -> Growth:
        row = series.names[account]
        slope, now = float(series.slopes[row]), series.level(row)
        grown = max(0, round(now - said.base))
        since = said.first.since_step
        return Growth(process, account, slope, round(now), grown, since, self._share(account, slope, rss), again=True)

    def _cause(self, series: _Series, account: str) -> str:
        """Follow the growth of an account to the smallest part that explains it."""
        while True:
            slope = self._slope(series, account)
            parts = [name for name in series.names if self._inside(name) == account]
            most = max(parts, key=lambda name: self._slope(series, name), default=None)
            if most is None or self._slope(series, most) < _BLAMED * slope:
                return UNACCOUNTED if account == RSS and UNACCOUNTED in series.names else account
            account = most

    def _share(self, account: str, slope: float, rss: float) -> float | None:
        """Its part of the growth of resident memory; None where it is no part of that, or that does not grow."""
        whole: str | None = account
        while whole is not None and whole != RSS:
            whole = self._inside(whole)
        return None if whole is None or rss <= 0 else min(1.0, max(0.0, slope / rss))

    def _inside(self, account: str) -> str | None:
        return self._handles_in if account.startswith("handles.") else _INSIDE.get(account)

    @staticmethod
    def _slope(series: _Series, account: str) -> float:
        row = series.names.get(account)
        return 0.0 if row is None else float(series.slopes[row])

    # -- telling ---------------------------------------------------------------------------------------------

    @property
    def growing(self) -> tuple[Growth, ...]:
        """What grows now, the fastest first."""
        found = [said.last for series in self._processes.values() for said in series.said.values()]
        return tuple(sorted(found, key=lambda growth: -growth.bytes_per_step))

    @property
    def processes(self) -> tuple[str, ...]:
        """Those that were recorded, in the order they came."""
        return tuple(self._processes)

    def steps(self, process: str) -> int:
        """How many steps of a process were recorded."""
        series = self._processes.get(process)
        return 0 if series is None else series.seen

    def accounts(self, process: str) -> dict[str, Account]:
        """The accounts of a process: what they have, had at the first step, and grow by."""
        series = self._processes.get(process)
        if series is None:
            return {}
        return {
            name: Account(
                series.now.get(name, 0),
                series.first.get(name, 0) if series.seen else series.now.get(name, 0),
                float(series.slopes[series.names[name]]) if series.full and name in series.names else None,
            )
            for name in dict.fromkeys([*series.now, *series.names])
        }

    @property
    def verdict(self) -> str:
        """One line: what grows, or that nothing does, or that it is too early to say."""
        if growing := self.growing:
            return "growing: " + "; ".join(_said(growth) for growth in growing)
        seen = max((series.seen for series in self._processes.values()), default=0)
        if seen < self.window_steps:
            return f"too early to say: {seen} of {self.window_steps} steps were seen"
        return f"nothing grows: seen over the last {self.window_steps} steps"


def _said(growth: Growth) -> str:
    line = f"{growth.account} of {growth.process} by {growth.bytes_per_step / 1e6:.2f} MB a step"
    line += f" since step {growth.since_step}"
    if growth.of_rss is not None and growth.account != RSS:
        line += f", {growth.of_rss:.0%} of the growth of its resident memory"
    return line


def _gap(steps: deque[int]) -> float:
    """Trainer steps between two records, on average; 1 where a trainer went back."""
    return max(1.0, (steps[-1] - steps[0]) / (len(steps) - 1))


def _whole(accounts: Mapping[str, int]) -> dict[str, int]:
    """The accounts, and what of the resident memory is in none of them."""
    if RSS not in accounts or "python_heap" not in accounts:
        return dict(accounts)
    known = sum(accounts.get(name, 0) for name, inside in _INSIDE.items() if inside == RSS and name != UNACCOUNTED)
    return dict(accounts) | {UNACCOUNTED: max(0, accounts[RSS] - known)}
