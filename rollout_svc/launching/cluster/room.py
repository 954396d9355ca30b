"""Whether nodes could hold bundles at all, if nothing else ran there.

Invariants:

- Pure; the one place that knows when a bundle fits, for whoever looks before a start and whoever waits for room.
- Only what is certain is said: bundles that fit one by one and all together are let through.
- Amounts are compared as Ray compares them, which counts in ten thousandths: sums of fractions are off by less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rollout_svc.config import Resources

__all__ = ["Lack", "fits", "lacks", "summed", "worded"]

_SLACK: Final = 1e-6  # of a resource


@dataclass(frozen=True, slots=True)
class Lack:
    """What stands in the way of a group, on nodes that hold so much.

    Attributes:
        kind: `bundle`: no node can hold that one; `together`: all nodes together hold less than all bundles;
            `strict_pack`: no node holds all of them; `strict_spread`: there are fewer nodes than bundles.
        wanted: what does not fit.
        held: by all nodes together, of what is wanted.
        index: of the bundle, where it is one.
    """

    kind: Literal["bundle", "together", "strict_pack", "strict_spread"]
    wanted: Resources
    held: Resources
    index: int | None = None


def summed(parts: Iterable[Mapping[str, float]]) -> Resources:
    """Add resources up."""
    whole: Resources = {}
    for part in parts:
        for name, amount in part.items():
            whole[name] = whole.get(name, 0.0) + amount
    return whole


def fits(bundle: Mapping[str, float], held: Mapping[str, float]) -> bool:
    """Whether there is so much of everything."""
    return all(amount <= held.get(name, 0.0) + _SLACK for name, amount in bundle.items())


def lacks(bundles: Sequence[Mapping[str, float]], strategy: str, nodes: Sequence[Mapping[str, float]]) -> list[Lack]:
    """Say why a group can never be placed: every bundle that has no node, else the first rule it breaks.

    Args:
        bundles: what the group holds.
        strategy: as Ray spells it.
        nodes: all that each node has.
    """
    whole, held = summed(bundles), summed(nodes)

    def lack(kind: Literal["bundle", "together", "strict_pack", "strict_spread"], wanted: Mapping[str, float]) -> Lack:
        return Lack(kind, dict(wanted), {name: held.get(name, 0.0) for name in wanted})

    alone = [
        Lack("bundle", dict(bundle), {name: held.get(name, 0.0) for name in bundle}, index)
        for index, bundle in enumerate(bundles)
        if not any(fits(bundle, node) for node in nodes)
    ]
    if alone:
        return alone
    if not fits(whole, held):
        return [lack("together", {name: amount for name, amount in whole.items() if not fits({name: amount}, held)})]
    if strategy == "STRICT_PACK" and not any(fits(whole, node) for node in nodes):
        return [lack("strict_pack", whole)]
    if strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return [lack("strict_spread", whole)]
    return []


def worded(resources: Mapping[str, float]) -> str:
    """Say how much of what."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"
