"""What goes wrong in a history: each fault has a name, a chance, and a count of where it met the ladder.

Invariants:

- Faults are drawn from the seed alone, and none is drawn once the history is healed.
- A fault counts where the climb stands when it strikes, and at every rung that is reached while it is live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

__all__ = ["FAULTS", "IMPOSSIBLE", "RARE", "STANDS", "Faults", "Strike"]

STANDS: Final = ("running", "gate", "freeze", "wait", "abort", "judges", "http", "tasks", "report", "paused")
"""Where a climb can stand; `gate` is left for `abort` in the climb's first step."""

REQUEST: Final = (
    "answer_late",
    "answer_twice",
    "answer_after_resume",
    "answer_malformed",
    "answer_never",
    "reset_before",
    "reset_after",
)
EXPERTS: Final = ("experts_missing", "experts_rows", "experts_range")
DECODE: Final = ("experts_slow",)
ABORT: Final = ("abort_lost", "abort_delayed", "abort_ignored")
FREEZE: Final = ("freeze_lost", "freeze_delayed", "freeze_refused")
ENGINE: Final = ("refused", "slow", "frozen", "crashed", "old_weights")
JUDGE: Final = ("judge_slow", "judge_hung", "judge_raising", "judge_swallowing")
AGENT: Final = ("agent_swallowing", "agent_slow_cleanup", "agent_tool")
PUT: Final = ("put_blocked",)
CALLER: Final = ("caller_cancelled", "flap", "overlap", "old_ticket")
CRASH: Final = ("service_crash", "put_crash_before", "put_crash_after")
_ALWAYS: Final = (*REQUEST, *ABORT, *FREEZE, *ENGINE, *JUDGE, *AGENT, *PUT, *CALLER, *CRASH)
ROUTED: Final = (*EXPERTS, *DECODE)
"""Of histories whose samples have routed experts; drawn apart, so that the others are as they would be without."""
FAULTS: Final = (*_ALWAYS, *ROUTED)
_RATES: Final = {
    **dict.fromkeys(REQUEST, (0.02, 0.12)),
    **dict.fromkeys(EXPERTS, (0.02, 0.12)),
    **dict.fromkeys(DECODE, (0.1, 0.4)),
    **dict.fromkeys(ABORT, (0.1, 0.6)),
    **dict.fromkeys(FREEZE, (0.1, 0.5)),
    **dict.fromkeys(ENGINE, (0.2, 1.0)),
    **dict.fromkeys(JUDGE, (0.03, 0.15)),
    **dict.fromkeys(AGENT, (0.05, 0.4)),
    **dict.fromkeys(PUT, (0.1, 0.4)),
    **dict.fromkeys(CALLER, (0.1, 0.4)),
    "service_crash": (1.0, 1.0),
    "put_crash_before": (0.2, 0.2),
    "put_crash_after": (0.2, 0.2),
}
_RARE: Final = frozenset(CRASH)
_TAKEN_BACK: Final = "the climb takes every put back in the step it reaches this rung, and only lane train has puts"
IMPOSSIBLE: Final[dict[tuple[str, str], str]] = {
    ("judge_raising", "tasks"): "judges end at the rung before, and a climb that has none does not get here",
    ("put_crash_before", "tasks"): _TAKEN_BACK,
    ("put_crash_after", "tasks"): _TAKEN_BACK,
}
"""Cells of the table that stay 0, each with the reason."""
_ENDED: Final = "every call of a closed lane is ended at the rung before: only one of a lane that stays open gets here"
RARE: Final[dict[tuple[str, str], str]] = {(fault, "tasks"): _ENDED for fault in (*REQUEST, *EXPERTS)}
"""Cells that a few of 3,000 histories reach, or none, each with the reason."""


class Strike:
    """A fault that struck and is live until it is ended."""

    __slots__ = ("_faults", "name")

    def __init__(self, faults: Faults, name: str) -> None:
        self.name = name
        self._faults = faults

    def end(self) -> None:
        """It is over; idempotent."""
        self._faults.live.pop(self, None)


class Faults:
    """The faults of one history."""

    def __init__(self, rng: Random) -> None:
        self.stand = "running"
        self.healed = False
        self.live: dict[Strike, None] = {}
        self.met: Counter[tuple[str, str]] = Counter()
        self.on_stand: Callable[[str], None] = lambda _: None
        self._rng = rng
        self.rates = self._weather(rng, _ALWAYS)

    @staticmethod
    def _weather(rng: Random, names: tuple[str, ...]) -> dict[str, float]:
        """Which faults this history has, and how often: none, a few, or many at once."""
        share = rng.choice((0.0, 0.1, 0.2, 0.2, 0.35, 0.6))
        rates: dict[str, float] = {}
        for name in names:
            chance = share * 0.7 if name in _RARE else share
            if rng.random() < chance:
                rates[name] = rng.uniform(*_RATES[name])
        return rates

    def also(self, names: tuple[str, ...], rng: Random) -> None:
        """Have more kinds of them, drawn apart."""
        self.rates |= self._weather(rng, names)

    def draw(self, among: tuple[str, ...]) -> str | None:
        """The fault that strikes now, if any does."""
        if self.healed:
            return None
        for name in among:
            rate = self.rates.get(name)
            if rate is not None and self._rng.random() < rate:
                return name
        return None

    def strike(self, name: str) -> Strike:
        """Count a fault where the climb stands, and at each rung reached until it is ended."""
        strike = Strike(self, name)
        self.met[name, self.stand] += 1
        self.live[strike] = None
        return strike

    def once(self, name: str) -> None:
        """Count a fault that is over as soon as it struck."""
        self.met[name, self.stand] += 1

    def stands(self, where: str) -> None:
        """The climb reached another rung, or ended."""
        if where != self.stand:
            self.stand = where
            for strike in self.live:
                self.met[strike.name, where] += 1
            self.on_stand(where)
