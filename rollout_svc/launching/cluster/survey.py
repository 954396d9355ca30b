"""What a cluster has, against what the engines of a configuration want: found out before anything is started.

Invariants:

- Only what is certain to fail is a problem: engines that could be placed if nothing else ran there are let through.
- Nothing is made on the cluster; a connection that was made for the look is ended with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_svc.config import Config, Resources
from rollout_svc.errors import Problem
from rollout_svc.filtering.threads import CallThreads
from rollout_svc.launching.cluster.placing import Layout, layout_of
from rollout_svc.launching.cluster.room import Lack, fits, lacks, summed, worded
from rollout_svc.tensors.ray_connection import connect, first_line

__all__ = ["LOOK_S", "Survey", "lacking", "survey"]

LOOK_S: Final = 30.0
"""Seconds for a cluster to be joined and to say what it has: it takes a few."""
_UNSAID: Final = ("node:", "accelerator_type:", "memory", "object_store_memory")  # what nobody's bundle names


@dataclass(frozen=True, slots=True)
class Survey:
    """A cluster, and whether the engines have a place there.

    Attributes:
        record: for people: `address`, `nodes`, `free`, `wanted`, `strategy`, and `failure` where it does not answer.
        problems: what would fail.
        doubts: what may have to wait.
    """

    record: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()
    doubts: tuple[Problem, ...] = ()


def lacking(nodes: Sequence[Mapping[str, float]], layout: Layout) -> list[Problem]:
    """Say which engines can have no place on nodes that hold so much; empty where nothing is known to be in the way."""
    workers = {index: worker_id.removeprefix("w") for worker_id, index in layout.places.items()}
    return [_problem(lack, workers, layout, len(nodes)) for lack in lacks(layout.bundles, layout.strategy, nodes)]


def _problem(lack: Lack, workers: Mapping[int, str], layout: Layout, nodes: int) -> Problem:
    match lack.kind:
        case "bundle":
            path = f"workers.{workers[lack.index or 0]}.launch.resources"
            return Problem(path, f"no node of the cluster has {worded(lack.wanted)}")
        case "together":
            told = f"the engines want {worded(lack.wanted)}, and all nodes together have {worded(lack.held)}"
            return Problem("cluster", told)
        case "strict_pack":
            return Problem("cluster.strategy", f"strict_pack: no node has {worded(lack.wanted)} for all engines")
        case "strict_spread":
            told = f"strict_spread: {len(layout.bundles)} engines, each on a node of its own, and {nodes} nodes"
            return Problem("cluster.strategy", told)


async def survey(config: Config, deadline_s: float = LOOK_S) -> Survey | None:
    """Look at the cluster of a configuration; None where it has none."""
    if config.cluster is None:
        return None
    address, layout = config.cluster.address, layout_of(config)
    record: dict[str, Any] = {"address": address, "strategy": config.cluster.strategy, "failure": None}
    record["wanted"] = summed(layout.bundles)
    try:
        nodes, free = await CallThreads("survey").call(lambda: _look(address), deadline_s)
    except TimeoutError:
        record["failure"] = f"no answer within {deadline_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever Ray says of a cluster that is not there
        record["failure"] = f"{type(error).__name__}: {first_line(error)}"
    if record["failure"] is not None:
        told = f"{address} cannot be reached: {record['failure']}"
        return Survey(record | {"nodes": [], "free": {}}, (Problem("cluster.address", told),))
    record |= {"nodes": nodes, "free": free}
    problems = tuple(lacking([node["total"] for node in nodes], layout))
    short = {name: amount for name, amount in record["wanted"].items() if not fits({name: amount}, free)}
    doubts: tuple[Problem, ...] = ()
    if short and not problems:
        now = worded({name: free.get(name, 0.0) for name in short})
        told = f"the engines want {worded(short)}, and {now} is free now: they wait for start_timeout_s"
        doubts = (Problem("cluster", told),)
    return Survey(record, problems, doubts)


def _look(address: str) -> tuple[list[dict[str, Any]], Resources]:
    """Say what each node of a cluster holds, and what all together have free; blocks."""
    import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

    here: Any = ray
    joined = here.is_initialized()
    connect(address)
    try:
        nodes = [
            {"address": node["NodeManagerAddress"], "total": _said(node["Resources"])}
            for node in here.nodes()
            if node["Alive"]
        ]
        return nodes, _said(here.available_resources())
    finally:
        if not joined:
            here.shutdown()


def _said(resources: Mapping[str, float]) -> Resources:
    return {name: amount for name, amount in sorted(resources.items()) if not name.startswith(_UNSAID)}
