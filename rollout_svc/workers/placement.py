"""Where a launched engine makes its Ray workers: bundles of a placement group that it does not own.

The engine's rank r runs in the r-th bundle of the list, and the trainer's rank r beside it, so a weight finds its shard
by its rank. An order by address would tear the two apart as soon as the group is on more than one machine.

Invariants:

- Pure: what Ray says of its groups in, the group, its problems and the variable out; `placement_groups.py` asks Ray.
- The order of the list is kept. Nothing here sorts it: addresses are there to be named, not to be compared.
- Whatever is wrong with a list is said at once, each at its place in the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rollout_svc.config import BUNDLES_VARIABLE, PlacementConfig, WorkerConfig
from rollout_svc.errors import Problem
from rollout_svc.launching import LaunchFailed

__all__ = [
    "Bundle",
    "Groups",
    "PlacementGroup",
    "bundles_of",
    "environment",
    "group_named",
    "ignored",
    "problems",
    "remarks",
]

_READY: Final = "CREATED"  # what Ray calls a group whose bundles all have their places


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is set aside on one node.

    Attributes:
        resources: how much of each.
        address: of its node; empty where Ray knows none.
    """

    resources: Mapping[str, float]
    address: str = ""

    def __str__(self) -> str:
        held = ", ".join(f"{name} {amount:g}" for name, amount in sorted(self.resources.items()) if amount > 0)
        return f"{held or 'nothing'}{' on ' if self.address else ''}{self.address}"


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """A group of bundles, by their indices from 0."""

    name: str
    bundles: tuple[Bundle, ...]


class Groups(Protocol):
    """Knows the placement groups of a cluster."""

    async def find(self, name: str) -> PlacementGroup:
        """Look a group up by its name or id; raises LaunchFailed where that cannot be done."""


def problems(config: PlacementConfig, group: PlacementGroup) -> list[Problem]:
    """Name every bundle of the list that is not in the group, is there twice, or lacks the device; and if too few."""
    found = []
    usable = set()
    count = len(group.bundles)
    for place, index in enumerate(config.bundles):
        first = config.bundles.index(index)
        words = ""
        if not 0 <= index < count:
            words = f"{index} is no bundle of the group: it has {count}, counted from 0"
        elif group.bundles[index].resources.get(config.device, 0) <= 0:
            words = f"bundle {index} holds no {config.device}, but {group.bundles[index]}"
        elif first != place:
            words = f"bundle {index} is already bundles.{first}"
        else:
            usable.add(index)
        if words:
            found.append(Problem(f"placement.bundles.{place}", words))
    if len(usable) < config.tensor_parallel:
        words = f"{len(usable)} of the bundles can be used, and tensor_parallel is {config.tensor_parallel}"
        found.append(Problem("placement.bundles", words))
    return found


def bundles_of(config: PlacementConfig, group: PlacementGroup) -> str:
    """Return the list as the engine reads it, in the order it was given.

    Raises:
        LaunchFailed: the group does not have these bundles; the message has every problem, each with its place.
    """
    found = problems(config, group)
    if found:
        listed = ", ".join(map(str, config.bundles))
        said = "; ".join(map(str, found))
        raise LaunchFailed(f"bundles [{listed}] of placement group {group.name!r}: {said}")
    return ",".join(map(str, config.bundles))


async def environment(config: PlacementConfig | None, groups: Groups) -> dict[str, str]:
    """Return what a process is told of its placement: nothing where none is set.

    One with a group of its own is told that there is no list: LMDeploy's Ray engine takes the first bundle of one that
    it inherited, whoever owns the group. A group is looked at each time: another may have its name at the next start.

    Raises:
        LaunchFailed: the group cannot be looked at, or does not have these bundles.
    """
    if config is None:
        return {}
    if config.owns_group or config.group is None:
        return {BUNDLES_VARIABLE: ""}
    return {BUNDLES_VARIABLE: bundles_of(config, await groups.find(config.group))}


def remarks(workers: Iterable[WorkerConfig]) -> list[str]:
    """Say of each worker whose placement is ignored that it is, at its place in the settings."""
    said = ((place, ignored(one.launch.placement)) for place, one in enumerate(workers) if one.launch is not None)
    return [f"workers.{place}.launch.placement: {words}" for place, words in said if words is not None]


def ignored(config: PlacementConfig | None) -> str | None:
    """Say that the setting is ignored, where it is."""
    if config is None or not config.owns_group:
        return None
    listed = ", ".join(map(str, config.bundles))
    return f"ignored: the engine owns its placement group (owns_group), so the bundles [{listed}] are not passed on"


def group_named(name: str, table: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]) -> PlacementGroup:
    """Pick a group, by name or id, from what Ray says of all of them.

    Args:
        name: its name, or its id in hexadecimal.
        table: Ray's `placement_group_table()`; groups that were removed stay in it for a while.
        addresses: of the nodes, by their ids.

    Raises:
        LaunchFailed: there is none, there are several, or its bundles have no places yet.
    """
    known = {key: entry for key, entry in table.items() if entry["state"] != "REMOVED"}
    found = {key: entry for key, entry in known.items() if name in (key, entry["name"])}
    if not found:
        others = ", ".join(repr(entry["name"] or key) for key, entry in known.items())
        raise LaunchFailed(f"placement.group: there is no placement group {name!r}, but {others or 'none at all'}")
    if len(found) > 1:
        raise LaunchFailed(f"placement.group: several are called {name!r}; give one of the ids {', '.join(found)}")
    [entry] = found.values()
    if entry["state"] != _READY:
        raise LaunchFailed(f"placement.group: {name!r} is not ready: Ray says {entry['state']}")
    nodes = entry["bundles_to_node_id"]
    bundles = [
        Bundle(resources, addresses.get(nodes.get(index, ""), ""))
        for index, resources in sorted(entry["bundles"].items())
    ]
    return PlacementGroup(name, tuple(bundles))
