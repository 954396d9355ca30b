"""Which bundle of which placement group an engine gets, and why there is no room for one.

Invariants:

- Pure: the settings, and what nodes have, in; bundles, their order and words out.
- The engines of a configuration share one group, so that they can be spread or packed; one that is added while the
  service runs has a group of its own.
- An engine in a group of the trainer's is set aside nothing: what it needs is the trainer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollout_svc.config import Config, LaunchConfig, Resources
from rollout_svc.launching.cluster.room import lacks, summed, worded

__all__ = ["Layout", "Node", "bundle_of", "in_trainers_group", "layout_of", "why_no_room"]

_DEFAULT: Final[Resources] = {"CPU": 1.0}
_NAMED: Final = 8  # nodes that are named one by one


@dataclass(frozen=True, slots=True)
class Layout:
    """The group of the configured engines.

    Attributes:
        bundles: what each holds, in order.
        strategy: how they are laid out over nodes, as Ray spells it.
        places: index of the bundle of each worker, by its id.
    """

    bundles: tuple[Resources, ...] = ()
    strategy: str = "PACK"
    places: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive.

    Attributes:
        address: where it is.
        total: all it has of each resource.
        free: what of that is set aside for nobody.
    """

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def bundle_of(config: LaunchConfig) -> Resources:
    """What is set aside for an engine."""
    return dict(config.resources or _DEFAULT)


def layout_of(config: Config) -> Layout:
    """Lay the engines of a configuration out; those in a group of the trainer's have no bundle here."""
    if config.cluster is None:
        return Layout()
    bundles: list[Resources] = []
    places: dict[str, int] = {}
    for index, worker in enumerate(config.workers):
        if worker.launch is not None and not in_trainers_group(worker.launch):
            places[f"w{index}"] = len(bundles)
            bundles.append(bundle_of(worker.launch))
    return Layout(tuple(bundles), config.cluster.strategy.upper(), places)


def in_trainers_group(config: LaunchConfig) -> bool:
    """Whether an engine lives in a placement group that somebody else owns."""
    return config.placement is not None and not config.placement.owns_group


def why_no_room(bundles: Sequence[Mapping[str, float]], strategy: str, nodes: Sequence[Node]) -> str:
    """Say why a group is not placed: what is wanted, what the nodes have, and where more nodes are the only help.

    Args:
        bundles: what the group holds.
        strategy: as Ray spells it.
        nodes: those that are alive.
    """
    alike = Counter(map(worded, bundles))
    wanted = ", ".join(f"{count} x ({words})" if count > 1 else f"({words})" for words, count in alike.items())
    kinds = list(dict.fromkeys(name for bundle in bundles for name in bundle))
    told = [f"{node.address} {_free(node, kinds)}" for node in nodes[:_NAMED]]
    if len(nodes) > _NAMED:
        told.append(f"{len(nodes) - _NAMED} more")
    never = _never(bundles, strategy, nodes)
    verdict = f"these nodes never have room: {never}" if never else "there is no room for it now"
    return f"{verdict}; wanted: {wanted} by {strategy.lower()}; free: {'; '.join(told) or 'no node is alive'}"


def _free(node: Node, kinds: Sequence[str]) -> str:
    return ", ".join(f"{name} {node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g}" for name in kinds)


def _never(bundles: Sequence[Mapping[str, float]], strategy: str, nodes: Sequence[Node]) -> str:
    """Say what could not be placed if these nodes were empty; nothing where all could, as far as is easily told."""
    found = lacks(bundles, strategy, [node.total for node in nodes])
    if not found:
        return ""
    lack, whole = found[0], worded(summed(bundles))
    match lack.kind:
        case "bundle":
            return f"none has {worded(lack.wanted)}"
        case "strict_spread":
            return f"strict_spread wants {len(bundles)} nodes, and there are {len(nodes)}"
        case "strict_pack":
            return f"strict_pack wants {whole} on one"
        case "together":
            return f"all together have less than {whole}"
