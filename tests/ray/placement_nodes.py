"""A Ray cluster of three nodes, and a service that launches engines into a group on it: `python -m` this, and a folder.

The nodes are raylets on this machine, each at a loopback address of its own. The trainer wants the bundles of the group
in an order that neither their indices nor their addresses have. What was seen is one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.cluster import raylets
from rollout_svc.events import EngineExited
from rollout_svc.launching import LaunchFailed
from rollout_svc.workers.placement_groups import RayGroups
from tests.support.stage import stage

HEAD = "127.0.0.10"
OTHERS = ("127.0.0.9", "127.0.0.2")
PLACES = ("127.0.0.2", "127.0.0.10", "127.0.0.9", "127.0.0.10")
"""Where each bundle is; the last one is without the device."""
ORDER = (2, 0, 1)
DEVICE = "SIM"
BYTES = 80 * 2**20  # of each node's object store: the least that Ray takes


def start(home: Path) -> Any:
    """Start the nodes and make the group, as a trainer that then goes on without us."""
    import ray
    from ray.util.placement_group import placement_group

    def node(address: str) -> raylets.Node:
        return raylets.Node(address, 2, {f"at-{address}": 1.0, DEVICE: 1.0}, BYTES)

    cluster = raylets.start(home, node(HEAD), [node(address) for address in OTHERS])
    bundles = [{"CPU": 0.5, f"at-{address}": 0.1} for address in PLACES]
    for bundle in bundles[:-1]:
        bundle[DEVICE] = 1.0
    group = placement_group(bundles, name="trainer", lifetime="detached")
    assert group.wait(20)
    ray.shutdown()
    return cluster


def engine(folder: Path, name: str, bundles: tuple[int, ...]) -> dict[str, Any]:
    """An engine that writes down what it was told of its bundles, and ends."""
    write = f'printf %s "$LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES" > {folder / name}'
    placed = {"bundles": bundles, "tensor_parallel": 3, "device": DEVICE, "group": "trainer"}
    command = ["sh", "-c", write, "{port}"]
    return {"launch": {"command": command, "log_dir": str(folder), "restarts": 0, "placement": placed}}


async def look(folder: Path, address: str) -> dict[str, Any]:
    """Look the group up, and launch two engines: one into good bundles, one into bad ones."""
    seen: dict[str, Any] = {"order": ORDER}
    try:
        await RayGroups("127.0.0.1:1").find("trainer")
    except LaunchFailed as failure:
        seen["unreachable"] = str(failure)
    group = await RayGroups(address).find("trainer")
    seen["places"] = [bundle.address for bundle in group.bundles]
    engines = engine(folder, "good", ORDER), engine(folder, "bad", (3, 2, 4))
    async with stage(*engines, ready=False, experts={"ray_address": address}) as made:
        await made.until(lambda: len(made.of(EngineExited)) == len(engines), "both are over")
        seen |= {event.worker: event.how for event in made.of(EngineExited)}
    seen["told"] = {name: (folder / name).read_text() for name in ("good", "bad") if (folder / name).exists()}
    return seen


if __name__ == "__main__":
    home = Path(sys.argv[1])
    os.environ |= raylets.environment_of(str(home))
    started = start(home)
    try:
        print(json.dumps(asyncio.run(look(home, started.address))))  # noqa: T201 - what the test reads
    finally:
        raylets.end(started)
