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
from typing import Final

import numpy as np

from rollout_svc.observe.memory.growth import Account, Growth, News
from rollout_svc.observe.memory.series import Said, Series
from rollout_svc.observe.memory.shape import condense, rises

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
_AGREE: Final = 2  # steps in a row
_ENDED: Final = 0.25  # of the slope it had when it was said


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
        self._processes: dict[str, Series] = {}

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

    def _series(self, process: str) -> Series:
        series = self._processes.get(process)
        if series is None:
            series = self._processes[process] = Series(self.window_steps)
        return series

    # -- judging ---------------------------------------------------------------------------------------------

    def _suspects(self, series: Series) -> tuple[list[str], dict[str, int]]:
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

    def _judge(self, process: str, series: Series, suspects: Iterable[str], start: Mapping[str, int]) -> News:
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

    def _first(self, process: str, series: Series, account: str, start: int, rss: float) -> Growth:
        """Begin to tell of an account."""
        row = series.names[account]
        base = float(np.median(series.values[row, max(0, start - 2) : start + 3]))
        since = series.steps[min(start, len(series.steps) - 1)]
        slope, now = float(series.slopes[row]), series.level(row)
        grown = max(0, round(now - base))
        growth = Growth(
            process, account, slope, round(now), grown, since, self._share(account, slope, rss), again=False
        )
        series.said[account] = Said(growth, growth, base, max(1.0, grown))
        return growth

    def _growth(self, process: str, series: Series, account: str, said: Said, rss: float) -> Growth:
        row = series.names[account]
        slope, now = float(series.slopes[row]), series.level(row)
        grown = max(0, round(now - said.base))
        since = said.first.since_step
        return Growth(process, account, slope, round(now), grown, since, self._share(account, slope, rss), again=True)

    def _cause(self, series: Series, account: str) -> str:
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
    def _slope(series: Series, account: str) -> float:
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
