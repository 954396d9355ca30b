"""Case `pause4`: a clean pause of four shards with 4,096 requests in flight, over one service with 1,024.

The engines hold their generations until they are aborted. The time is that of `pause.remote(…)`, as a trainer waits
for it: every answer parsed, recorded, handed back, and every engine's own count seen at 0.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cluster.deployments import OnRay, canned, config
from bench.pause import FILL_TIMEOUT_S, MAX_TOKENS, POLL_S, at_engine
from bench.report import Point, interleaved, progress

if TYPE_CHECKING:
    from bench.cluster.nodes import Nodes

__all__ = ["pause4"]

BOUND = 1.5
IN_FLIGHT = 1024
"""At each engine; a shard has one."""
SHARDS = 4


def pause4(nodes: Nodes, rounds: int) -> Point:
    """Measure case `pause4`; the first pause opens the connections and is not counted. Both sides have a journal."""
    engine = canned("--hold", on_ray=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        one = config([engine], IN_FLIGHT, MAX_TOKENS, journal=Path(folder) / "one.db")
        four = config([engine] * SHARDS, IN_FLIGHT, MAX_TOKENS, shards=SHARDS, journal=Path(folder) / "four.db")
        with OnRay(nodes, one, "held") as floor, OnRay(nodes, four, "held-4") as ours:
            for warm in (floor, ours):
                pause(warm)
            value, bare = interleaved(lambda: pause(ours), lambda: pause(floor), rounds)
    return Point("pause4", value, bare, BOUND)


def pause(ours: OnRay) -> float:
    """Seconds of one clean pause with everything under way, from the moment the engines count it."""
    ours.resume()
    urls = [worker["url"] for worker in ours.status()["workers"]]
    wanted = IN_FLIGHT * len(urls)
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while sum(map(at_engine, urls)) < wanted or (running := ours.status()["lanes"]["train"]["in_flight"]) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{running} of {wanted} requests are under way")
        time.sleep(POLL_S)
    cpu_s, start = ours.cpu_s, time.perf_counter()
    report = ours.pause()
    elapsed_s = time.perf_counter() - start
    stopped = sum(worker["answered"] for worker in report["workers"].values())
    if not report["clean"] or stopped != wanted:
        raise RuntimeError(f"not a clean pause of {wanted}: {report}")
    progress(
        f"pause4: {wanted} in flight at {len(urls)}: {1000 * elapsed_s:.0f} ms; the service used "
        f"{1000 * (ours.cpu_s - cpu_s):.0f} ms of CPU, on {len(os.sched_getaffinity(0))} processors"
    )
    return elapsed_s
