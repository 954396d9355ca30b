"""Engines in Ray actors, as seen from the service's event loop.

Invariants:

- Ray is called in threads: a cluster that does not answer costs a bounded time, and the loop waits for nothing.
- Every actor and every group made here ends with `close`; where that is never run, with the process that made them,
  for they are nobody's but its own: none has a name, and none is detached.
- An actor that was lost, with its node or alone, is one process that ended: it is made anew at the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from rollout_svc.config import ClusterConfig, Config, LaunchConfig
from rollout_svc.engines.ray_connection import connect, first_line
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.launching.cluster.host import EngineHost
from rollout_svc.launching.cluster.placing import bundle_of, in_trainers_group, layout_of
from rollout_svc.launching.cluster.seat import RaySeat
from rollout_svc.launching.launch import LaunchFailed

__all__ = ["RayLauncher"]

T = TypeVar("T")
_ASK_S: Final = (
    60.0  # seconds for a cluster to take a call: one that is there takes milliseconds, the first some seconds
)


class RayLauncher:
    """Has places for engines on a Ray cluster; see the module's invariants."""

    here: Final = None

    def __init__(self, config: Config) -> None:
        """Make a launcher for a configuration with a cluster; nothing is reached yet."""
        self._cluster = config.cluster or ClusterConfig()
        self._timeout_s = config.start_timeout_s
        self._layout = layout_of(config)
        self._threads = CallThreads("cluster")
        self._seats: dict[str, RaySeat] = {}
        self._group: asyncio.Future[Any] | None = None
        self._groups: list[Any] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<RayLauncher {len(self._seats)} seats, {len(self._groups)} groups at {self._cluster.address}>"

    async def seat(self, worker_id: str, config: LaunchConfig) -> RaySeat:
        """Give an engine an actor: the one it has, or a new one where that is gone.

        Raises:
            LaunchFailed: the cluster cannot be reached, or has no room within `start_timeout_s`.
        """
        seat = self._seats.get(worker_id)
        if seat is not None and await seat.look():
            return seat
        await self._call(lambda: connect(self._cluster.address))
        strategy = await self._strategy(worker_id, config)
        actor = await self._call(lambda: self._make(config, strategy))
        seat = self._seats[worker_id] = RaySeat(actor, lambda: self._seats.pop(worker_id, None))
        found = await seat.look(self._timeout_s)
        if not found or self._closed:
            await seat.release()
            wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle_of(config).items())
            raise LaunchFailed(f"no place on the cluster within {self._timeout_s:g} s ({wanted}): {seat.why}")
        return seat

    async def close(self, deadline: float) -> None:
        """End every process until `deadline` (loop time), then every actor and group."""
        self._closed = True
        seats = list(self._seats.values())
        await asyncio.gather(*(seat.close(deadline) for seat in seats))
        for group in self._groups:
            await self._call(partial(_remove, group))
        self._groups.clear()

    async def _strategy(self, worker_id: str, config: LaunchConfig) -> Any:
        """Where the actor goes: a bundle of the configuration's group, of a group of its own, or of the trainer's."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        if in_trainers_group(config) and config.placement is not None:
            name = config.placement.group or ""
            group = await self._call(lambda: _group_named(name))
            return PlacementGroupSchedulingStrategy(group, config.placement.bundles[0])
        index = self._layout.places.get(worker_id)
        if index is None:
            own = await self._call(lambda: _group([bundle_of(config)], "PACK"))
            self._groups.append(own)
            return PlacementGroupSchedulingStrategy(own, 0)
        if self._group is None:
            self._group = asyncio.ensure_future(self._configured())
        return PlacementGroupSchedulingStrategy(await asyncio.shield(self._group), index)

    async def _configured(self) -> Any:
        """Make the group of the configured engines."""
        group = await self._call(lambda: _group(list(self._layout.bundles), self._layout.strategy))
        self._groups.append(group)
        return group

    def _make(self, config: LaunchConfig, strategy: Any) -> Any:
        """Make an actor; in a thread. It is placed later: nothing here waits for room."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        held = {} if in_trainers_group(config) else bundle_of(config)
        options: dict[str, Any] = {"num_cpus": held.pop("CPU", 0), "num_gpus": held.pop("GPU", 0), "resources": held}
        if self._cluster.runtime_env:
            options["runtime_env"] = self._cluster.runtime_env
        return ray.remote(EngineHost).options(scheduling_strategy=strategy, max_restarts=0, **options).remote()

    async def _call(self, call: Callable[[], T]) -> T:
        """Call Ray in a thread; raises LaunchFailed."""
        where = f"Ray at {self._cluster.address}"
        try:
            result: T = await self._threads.call(call, _ASK_S)
        except TimeoutError:
            raise LaunchFailed(f"{where} did not answer within {_ASK_S:g} s") from None
        except NoThread as error:
            raise LaunchFailed(f"{where} does not answer: {error}") from error
        except LaunchFailed:
            raise
        except Exception as error:
            raise LaunchFailed(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        return result


def _group(bundles: list[dict[str, float]], strategy: str) -> Any:
    from ray.util.placement_group import placement_group  # noqa: PLC0415

    return placement_group(bundles, strategy)


def _group_named(name: str) -> Any:
    import ray  # noqa: PLC0415

    return ray.util.get_placement_group(name)


def _remove(group: Any) -> None:
    import ray  # noqa: PLC0415

    ray.util.remove_placement_group(group)
