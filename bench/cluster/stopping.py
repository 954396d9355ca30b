"""Case `pause4`: a clean pause of four shards with 4,096 requests in flight, over one service with 1,024.

The engines hold their generations until they are aborted. The time is that of `pause.remote(…)`, as a trainer waits
for it: every answer parsed, recorded, handed back, and every engine's own count seen at 0. Four services that know
nothing of each other are paused at once as well: what that takes is what the processors take, and no coordinator.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.cluster.deployments import OnRay, canned, config
from bench.pause import FILL_TIMEOUT_S, MAX_TOKENS, POLL_S, at_engine
from bench.report import Point, progress

if TYPE_CHECKING:
    from bench.cluster.nodes import Nodes

__all__ = ["pause4"]

BOUND = 1.5
IN_FLIGHT = 1024
"""At each engine; a shard has one."""
SHARDS = 4


def pause4(nodes: Nodes, rounds: int) -> Point:
    """Measure case `pause4`; the first pause opens the connections and is not counted. All sides have a journal."""
    engine = canned("--hold", on_ray=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        four = config([engine] * SHARDS, IN_FLIGHT, MAX_TOKENS, shards=SHARDS, journal=Path(folder) / "four.db")
        ours = stack.enter_context(OnRay(nodes, four, "held-4"))
        ones = []
        for number in range(SHARDS):
            one = config([engine], IN_FLIGHT, MAX_TOKENS, journal=Path(folder) / f"{number}.db")
            ones.append(stack.enter_context(OnRay(nodes, one, f"held-1-{number}")))
        pause([ours])
        pause(ones)
        found = [(pause([ours]), pause(ones[:1]), pause(ones)) for _ in range(rounds)]
    value, floor, beside = (median(one[place] for one in found) for place in range(3))
    progress(f"pause4: four services that know nothing of each other: {beside / floor:.2f} of one alone")
    return Point("pause4", value, floor, BOUND)


def pause(services: list[OnRay]) -> float:
    """Seconds of clean pauses, all at once, with everything under way, from the moment the engines count it."""
    import ray  # noqa: PLC0415 - a second to import, for who has a cluster

    urls = [worker["url"] for one in services for worker in one.status()["workers"]]
    wanted = IN_FLIGHT * len(urls)
    for one in services:
        one.resume()
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while sum(map(at_engine, urls)) < wanted or (running := sum(map(in_flight, services))) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{running} of {wanted} requests are under way")
        time.sleep(POLL_S)
    cpu_s, start = sum(one.cpu_s for one in services), time.perf_counter()
    reports = ray.get([one.handle.pause.remote(deadline_s=30.0) for one in services], timeout=FILL_TIMEOUT_S)
    elapsed_s = time.perf_counter() - start
    stopped = sum(worker["answered"] for report in reports for worker in report["workers"].values())
    if not all(report["clean"] for report in reports) or stopped != wanted:
        raise RuntimeError(f"not a clean pause of {wanted}: {reports}")
    progress(
        f"pause4: {wanted} in flight, {len(services)} services: {1000 * elapsed_s:.0f} ms; "
        f"they used {1000 * (sum(one.cpu_s for one in services) - cpu_s):.0f} ms of CPU, "
        f"on {len(os.sched_getaffinity(0))} processors"
    )
    return elapsed_s


def in_flight(service: OnRay) -> int:
    """Requests under way, by the service's count."""
    return int(service.status()["lanes"]["train"]["in_flight"])
