"""CPU per sample: `actor`, the service on a cluster over the plain one; `shards4`, four shards over one.

- What is compared takes turns in one run, and is paused while the other is measured.
- A sample counts when it went the whole way, to its batch: the smaller of those judged and those taken in a window.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.cluster.deployments import OnRay, Plain, canned, config
from bench.report import Point, progress
from bench.served import GROUP_SIZE

if TYPE_CHECKING:
    from bench.cluster.deployments import Deployment
    from bench.cluster.nodes import Nodes

__all__ = ["actor", "per_sample", "shards4"]

ACTOR_BOUND = 1.15
SHARDS_BOUND = 1.25
DELAY_S = 0.3
IN_FLIGHT = 512
"""Of all engines together, for an actor and the plain service."""
SHARDED_IN_FLIGHT = 2048
"""The same for shards: they are for a loop that is full."""
ENGINES = 4
WARM_BATCHES = 3
WINDOWS = 6
"""How often what is in flight is taken in one round."""


def per_sample(ours: Deployment, in_flight: int) -> float:
    """CPU of the service per sample, in ms, with `in_flight` requests under way; warm."""
    ours.resume()
    batch = in_flight // GROUP_SIZE  # the config's train_batch_size
    for _ in range(WARM_BATCHES):
        ours.take(batch)
    before_s, before = ours.cpu_s, answered(ours)
    taken = 0
    while taken < WINDOWS * in_flight:
        taken += ours.take(batch) * GROUP_SIZE
    after_s, after = ours.cpu_s, answered(ours)
    ours.pause()
    return 1000 * (after_s - before_s) / min(taken, after - before)


def answered(ours: Deployment) -> int:
    """Samples that were judged so far."""
    samples = ours.status()["ledger"]["samples"]
    return int(samples["ready"] + samples["leased"] + samples["consumed"])


def actor(nodes: Nodes, rounds: int) -> Point:
    """Measure case `actor`."""
    each = IN_FLIGHT // ENGINES
    workers = [canned("--delay", DELAY_S, on_ray=False)] * ENGINES
    on_ray = [canned("--delay", DELAY_S, on_ray=True)] * ENGINES
    plain = Plain(config(workers, each), "info")  # an actor's log is not turned down either
    with plain, OnRay(nodes, config(on_ray, each), "actor") as ours:
        return _compare("actor", ours, plain, rounds, ACTOR_BOUND, IN_FLIGHT, nodes)


def shards4(nodes: Nodes, rounds: int) -> Point:
    """Measure case `shards4`; both sides have a journal, for shards want one."""
    each = SHARDED_IN_FLIGHT // ENGINES
    workers = [canned("--delay", DELAY_S, on_ray=True)] * ENGINES
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        one = config(workers, each, journal=Path(folder) / "one.db")
        four = config(workers, each, shards=ENGINES, journal=Path(folder) / "four.db")
        with OnRay(nodes, one, "one") as floor, OnRay(nodes, four, "four") as ours:
            return _compare("shards4", ours, floor, rounds, SHARDS_BOUND, SHARDED_IN_FLIGHT, nodes)


def _compare(
    case: str, ours: Deployment, floor: Deployment, rounds: int, bound: float, in_flight: int, nodes: Nodes
) -> Point:
    pairs = []
    for number in range(rounds):
        raylets_s = nodes.raylets_cpu_s
        value = per_sample(ours, in_flight)
        raylets = 1000 * (nodes.raylets_cpu_s - raylets_s) / (WINDOWS * in_flight)
        pairs.append((value, per_sample(floor, in_flight)))
        progress(
            f"{case}: round {number + 1} of {rounds}: {pairs[-1][0]:.3f} ms over {pairs[-1][1]:.3f} ms; "
            f"beside it the raylets used {raylets:.3f} ms a sample"
        )
    return Point(case, median(value for value, _ in pairs), median(theirs for _, theirs in pairs), bound)
