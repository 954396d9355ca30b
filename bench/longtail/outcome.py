"""What came of one cell: pure arithmetic over what was seen.

Invariants:

- Use and rate are of a window in which the strategy has settled and prompts have not run out: from the hand-over of
  batch `warm` to the last one before the source was dry. Shares are of everything, first batch to last.
- Time in which a colocated trainer has the machines is no time here: it passes in none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.longtail.trace import TOKEN_S, Trace

__all__ = ["HandOver", "Outcome", "outcome", "warm_up"]

_FEWEST: Final = 5
"""Batches in a window; with fewer there is nothing to say."""


class HandOver(NamedTuple):
    """The moment a batch was handed over: when, and busy slot-seconds until then."""

    at_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a cell.

    Attributes:
        use: busy slot-seconds over all slot-seconds of the window.
        rate: batches a second in the window.
        long: share of the longest tenth among the prompts that were trained, over their share in the source.
        kept: tokens that were trained, over tokens that were made; of the whole run.
        batches: in the window.
    """

    use: float
    rate: float
    long: float
    kept: float
    batches: int


def warm_up(staleness: int) -> int:
    """Batches handed over before a window begins: as many as can be out at once, and one more."""
    return staleness + 2


def outcome(
    trace: Trace,
    slots: int,
    hand_overs: Sequence[HandOver],
    trained: Iterable[int],
    *,
    warm: int,
    dry_at_s: float,
    busy_s: float,
) -> Outcome:
    """Reckon up a run.

    Args:
        trace: what was to be done.
        slots: of the engine.
        hand_overs: of whole batches, in order.
        trained: prompts of all batches.
        warm: hand-overs before the window.
        dry_at_s: when the source gave its last prompt.
        busy_s: slot-seconds that were busy in the whole run.

    Raises:
        RuntimeError: too few batches were handed over.
    """
    window = [moment for moment in hand_overs[warm - 1 :] if moment.at_s <= dry_at_s]
    if len(window) <= _FEWEST:
        raise RuntimeError(f"{len(window)} batches were handed over between the start and the end of the prompts")
    first, last = window[0], window[-1]
    elapsed_s = last.at_s - first.at_s
    prompts = list(trained)
    share = sum(prompt in trace.longest_tenth for prompt in prompts) / len(prompts)
    useful_s = sum(sum(trace.tokens[prompt]) for prompt in prompts) * TOKEN_S
    return Outcome(
        use=(last.busy_s - first.busy_s) / (slots * elapsed_s),
        rate=(len(window) - 1) / elapsed_s,
        long=share * len(trace.tokens) / len(trace.longest_tenth),
        kept=useful_s / busy_s,
        batches=len(window) - 1,
    )
