"""What goes wrong between a coordinator and its shards: each fault has a name, a chance, and a count.

Invariant: drawn from the seed alone, and none once the history is healed.
"""

from __future__ import annotations

from random import Random
from typing import Final

from tests.simulation.faults import Faults

__all__ = ["CALLS", "FAULTS", "KILLS", "STANDS", "sharded_faults"]

STANDS: Final = ("starting", "running", "pausing", "paused", "resuming")
"""Where the coordinator stands."""
CALLS: Final = ("call_late", "call_lost", "call_hung", "answer_late", "answer_lost")
KILLS: Final = ("shard_before", "shard_during", "shard_after", "coordinator_before", "coordinator_after")
_ELSE: Final = (
    "shard_at_once",
    "shard_hushed",
    "coordinator_at_once",
    "caller_cancelled",
    "no_ack",
    "coordinator_owing",
)
FAULTS: Final = (*CALLS, *KILLS, *_ELSE)
_RATES: Final = {
    "call_late": (0.01, 0.08),
    "call_lost": (0.01, 0.05),
    "call_hung": (0.005, 0.03),
    "answer_late": (0.01, 0.08),
    "answer_lost": (0.01, 0.06),
    "shard_before": (0.002, 0.012),
    "shard_during": (0.002, 0.012),
    "shard_after": (0.002, 0.012),
    "coordinator_before": (0.001, 0.006),
    "coordinator_after": (0.001, 0.006),
    "shard_at_once": (0.1, 0.5),
    "shard_hushed": (0.1, 0.5),
    "coordinator_at_once": (0.05, 0.2),
    "caller_cancelled": (0.1, 0.4),
    "no_ack": (0.1, 0.4),
    "coordinator_owing": (0.3, 1.0),  # an ack was accepted, and a shard is still to be told
}


def sharded_faults(seed: int) -> Faults:
    """Draw which of them this history has, and how often."""
    rng = Random(f"{seed}:sharded faults")
    faults = Faults(rng)
    share = rng.choice((0.0, 0.15, 0.3, 0.3, 0.5, 0.8))
    faults.rates = {name: rng.uniform(*_RATES[name]) for name in FAULTS if rng.random() < share}
    faults.stand = "starting"
    return faults
