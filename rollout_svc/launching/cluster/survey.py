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
from rollout_svc.engines.ray_connection import connect, first_line
from rollout_svc.errors import Problem
from rollout_svc.filtering.threads import CallThreads
from rollout_svc.launching.cluster.placing import Layout, layout_of

__all__ = ["LOOK_S", "Survey", "lacking", "survey", "wanted"]

LOOK_S: Final = 30.0
"""Seconds for a cluster to be joined and to say what it has: it takes a few."""
_SLACK: Final = 1e-6  # Ray counts in ten thousandths
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


def wanted(bundles: Sequence[Resources]) -> Resources:
    """Add bundles up."""
    total: Resources = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def lacking(nodes: Sequence[Mapping[str, float]], layout: Layout) -> list[Problem]:
    """Say which engines can have no place on nodes that hold so much; empty where nothing is known to be in the way."""
    problems = []
    for worker_id, index in layout.places.items():
        if not any(_fits(layout.bundles[index], node) for node in nodes):
            told = f"no node of the cluster has {_told(layout.bundles[index])}"
            problems.append(Problem(f"workers.{worker_id.removeprefix('w')}.launch.resources", told))
    if problems:
        return problems
    total = wanted(layout.bundles)
    held = wanted([dict(node) for node in nodes])
    if not _fits(total, held):
        short = {name: amount for name, amount in total.items() if not _fits({name: amount}, held)}
        problems.append(
            Problem("cluster", f"the engines want {_told(short)}, and all nodes together have {_told(held, short)}")
        )
    elif layout.strategy == "STRICT_PACK" and not any(_fits(total, node) for node in nodes):
        problems.append(Problem("cluster.strategy", f"strict_pack: no node has {_told(total)} for all engines"))
    elif layout.strategy == "STRICT_SPREAD" and len(layout.bundles) > len(nodes):
        told = f"strict_spread: {len(layout.bundles)} engines, each on a node of its own, and {len(nodes)} nodes"
        problems.append(Problem("cluster.strategy", told))
    return problems


async def survey(config: Config, deadline_s: float = LOOK_S) -> Survey | None:
    """Look at the cluster of a configuration; None where it has none."""
    if config.cluster is None:
        return None
    address, layout = config.cluster.address, layout_of(config)
    record: dict[str, Any] = {"address": address, "strategy": config.cluster.strategy, "failure": None}
    record["wanted"] = wanted(layout.bundles)
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
    short = {name: amount for name, amount in record["wanted"].items() if not _fits({name: amount}, free)}
    doubts: tuple[Problem, ...] = ()
    if short and not problems:
        told = f"the engines want {_told(short)}, and {_told(free, short)} is free now: they wait for start_timeout_s"
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


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + _SLACK for name, amount in bundle.items())


def _told(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    chosen = resources if names is None else {name: resources.get(name, 0.0) for name in names}
    return ", ".join(f"{name} {amount:g}" for name, amount in chosen.items()) or "nothing"
