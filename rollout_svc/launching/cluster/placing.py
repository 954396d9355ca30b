"""Which bundle of which placement group an engine gets.

Invariants:

- Pure: the settings in, bundles and their order out.
- The engines of a configuration share one group, so that they can be spread or packed; one that is added while the
  service runs has a group of its own.
- An engine in a group of the trainer's is set aside nothing: what it needs is the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rollout_svc.config import Config, LaunchConfig, Resources

__all__ = ["Layout", "bundle_of", "layout_of"]

_DEFAULT: Final[Resources] = {"CPU": 1.0}


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
