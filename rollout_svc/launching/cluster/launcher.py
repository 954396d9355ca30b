"""Engines in Ray actors, as seen from the service's event loop.

Invariants:

- Ray is called in threads: a cluster that does not answer costs a bounded time, and the loop waits for nothing.
- Every actor made here is this process's own, and ends with it; so do the groups (`groups.py`).
- An actor that was lost, with its node or alone, is one process that ended: it is made anew at the next start, on
  whichever node its bundle is then; where that is the same, once the process that was lost there has ended.
- Whoever waits for room is told at once what is wanted, and what the nodes have.
- A bundle is given back with its seat: to Ray where the group was for this engine alone, else to the next engine that
  wants the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rollout_svc.config import ClusterConfig, Config, LaunchConfig
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.launching.cluster.groups import OwnGroups, group_called, nodes_alive, service_name, state_of
from rollout_svc.launching.cluster.host import EngineHost
from rollout_svc.launching.cluster.placing import bundle_of, in_trainers_group, layout_of, why_no_room
from rollout_svc.launching.cluster.seat import RaySeat
from rollout_svc.launching.launch import LaunchFailed
from rollout_svc.tasks import wait_until
from rollout_svc.tensors.ray_connection import connect, first_line

__all__ = ["RayLauncher"]

T = TypeVar("T")
_ASK_S: Final = (
    60.0  # seconds for a cluster to take a call: one that is there takes milliseconds, the first some seconds
)
_CLOSE_S: Final = 2.0  # seconds of a call while everything ends: the next one would be made by whoever is left
_LOOK_S: Final = 1.0  # seconds between two looks at why an engine has no place yet
_GONE: Final = "REMOVED"


@dataclass(slots=True)
class _Bundle:
    """Where an actor goes.

    Attributes:
        group: Ray's group.
        index: of the bundle in it.
        alone: the group was made for this engine.
    """

    group: Any
    index: int
    alone: bool = False


class RayLauncher:
    """Has places for engines on a Ray cluster; see the module's invariants."""

    here: Final = None

    def __init__(self, config: Config) -> None:
        """Make a launcher for a configuration with a cluster; nothing is reached yet."""
        self._cluster: ClusterConfig = config.cluster or ClusterConfig()
        self._timeout_s = config.start_timeout_s
        self._layout = layout_of(config)
        self._places = dict(self._layout.places)
        self._vacant: list[int] = []
        self._threads = CallThreads("cluster")
        self._seats: dict[str, RaySeat] = {}
        self._bundles: dict[str, _Bundle] = {}
        self._own = OwnGroups(self._cluster.namespace)
        self._making = asyncio.Lock()
        self._group: Any = None
        self._ending: set[asyncio.Future[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<RayLauncher {len(self._seats)} seats at {self._cluster.address}>"

    async def seat(self, worker_id: str, config: LaunchConfig, tell: Callable[[str], object]) -> RaySeat:
        """Give an engine an actor: the one it has, or a new one where that is gone.

        Raises:
            LaunchFailed: the cluster cannot be reached, or has no room within `start_timeout_s`.
        """
        try:
            return await self._seat(worker_id, config, tell)
        except asyncio.CancelledError:  # it is not wanted any more
            ending = asyncio.ensure_future(self._vacate(worker_id))
            self._ending.add(ending)
            ending.add_done_callback(self._over)
            raise

    async def _seat(self, worker_id: str, config: LaunchConfig, tell: Callable[[str], object]) -> RaySeat:
        before = self._seats.get(worker_id)
        if before is not None:
            if await before.look():
                return before
            before.drop()
        await self._call(lambda: connect(self._cluster.address))
        bundle = await self._bundle(worker_id, config)
        actor, name = await self._call(lambda: self._make(worker_id, config, bundle))
        within = (bundle.group.id.hex(), bundle.index) if in_trainers_group(config) else None
        seat = RaySeat(actor, f"rollout-{name}-", lambda: self._vacate(worker_id), within)
        self._seats[worker_id] = seat
        try:
            await self._placed(seat, bundle, config, tell)
        except (LaunchFailed, asyncio.CancelledError):
            seat.drop()
            raise
        if before is not None and before.placed and before.place.node_id == seat.place.node_id:
            tell("waits for the end of its last process, whose actor was lost")
            await seat.outlive(before.leash_pid)
        return seat

    async def close(self, deadline: float) -> None:
        """End every process until `deadline` (loop time), then every actor and group."""
        self._closed = True
        seats = list(self._seats.values())
        await asyncio.gather(*(seat.close(deadline) for seat in seats))
        await wait_until(self._ending, min(deadline, asyncio.get_running_loop().time() + _CLOSE_S))
        if self._own.made:
            await self._quietly(self._own.close)

    async def _placed(
        self, seat: RaySeat, bundle: _Bundle, config: LaunchConfig, tell: Callable[[str], object]
    ) -> None:
        """Wait until the actor is somewhere; raises LaunchFailed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        looking = asyncio.ensure_future(seat.look(self._timeout_s))
        why = ""
        try:
            while not looking.done() and not self._closed:
                await asyncio.wait({looking}, timeout=min(_LOOK_S, max(0.0, deadline - loop.time())))
                if not looking.done():
                    why = await self._call(lambda: self._why(bundle, config))
                    tell(why)
        finally:
            looking.cancel()
        if self._closed:
            raise LaunchFailed("the service stops")
        if not looking.done() or not looking.result():
            raise LaunchFailed(f"no place on the cluster within {self._timeout_s:g} s: {why or seat.why}")

    def _why(self, bundle: _Bundle, config: LaunchConfig) -> str:
        """Say why an actor is nowhere yet; in a thread. Raises LaunchFailed where it never will be anywhere."""
        state = state_of(bundle.group)
        if state == _GONE:
            raise LaunchFailed("its placement group was removed")
        if state == "CREATED":
            return "its actor is being started"
        if bundle.alone or in_trainers_group(config):
            words = why_no_room([bundle_of(config)], "PACK", nodes_alive())
        elif state == "RESCHEDULING":
            words = why_no_room([bundle_of(config)], self._layout.strategy, nodes_alive())
        else:
            words = why_no_room(self._layout.bundles, self._layout.strategy, nodes_alive())
        return f"its placement group is {state.lower()}: {words}"

    async def _bundle(self, worker_id: str, config: LaunchConfig) -> _Bundle:
        """The bundle an actor goes to: of the configuration's group, of a group of its own, or of the trainer's."""
        if in_trainers_group(config) and config.placement is not None:
            name = config.placement.group or ""
            return _Bundle(await self._call(lambda: group_called(name)), config.placement.bundles[0])
        making = asyncio.ensure_future(self._made(worker_id, config))
        self._ending.add(making)  # where the engine is not wanted any more meanwhile, `_vacate` finds what was made
        making.add_done_callback(self._over)
        return await asyncio.shield(making)

    async def _made(self, worker_id: str, config: LaunchConfig) -> _Bundle:
        """Find, or make, the bundle of an engine in a group of ours."""
        async with self._making:
            bundle = self._bundles.get(worker_id)
            if bundle is not None and not await self._is_gone(bundle.group):
                return bundle
            index = self._places.get(worker_id)
            if index is None and (index := self._vacated(config)) is not None:
                self._places[worker_id] = index
            if index is None:
                own = await self._call(lambda: self._own.make([bundle_of(config)], "PACK"))
                bundle = self._bundles[worker_id] = _Bundle(own, 0, alone=True)
                return bundle
            if self._group is None or await self._is_gone(self._group):
                self._group = await self._call(lambda: self._own.make(self._layout.bundles, self._layout.strategy))
            return _Bundle(self._group, index)

    async def _is_gone(self, group: Any) -> bool:
        """Whether a group was removed: by somebody else, or with its keeper."""
        return await self._call(lambda: state_of(group)) == _GONE

    def _over(self, ending: asyncio.Future[Any]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            ending.exception()  # seen, also where whoever asked was cancelled

    def _vacated(self, config: LaunchConfig) -> int | None:
        """Take a bundle of the configuration's group that nobody has any more, and that holds just what is wanted."""
        wanted = bundle_of(config)
        for index in self._vacant:
            if self._layout.bundles[index] == wanted:
                self._vacant.remove(index)
                return index
        return None

    async def _vacate(self, worker_id: str) -> None:
        """Give the place of an engine back that does not need it any more."""
        self._seats.pop(worker_id, None)
        if self._closed:
            return
        async with self._making:
            index = self._places.pop(worker_id, None)
            if index is not None:
                self._vacant.append(index)
            bundle = self._bundles.pop(worker_id, None)
        if bundle is not None:
            await self._quietly(lambda: _remove(bundle.group))

    def _make(self, worker_id: str, config: LaunchConfig, bundle: _Bundle) -> tuple[Any, str]:
        """Make an actor, in a thread, and say what this process is called. Nothing here waits for room."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        held = {} if in_trainers_group(config) else bundle_of(config)
        called = service_name()
        name = f"rollout-{called}-{worker_id}-{secrets.token_hex(4)}"
        options: dict[str, Any] = {"name": name, "namespace": self._cluster.namespace, "max_restarts": 0}
        options |= {"num_cpus": held.pop("CPU", 0), "num_gpus": held.pop("GPU", 0)}
        if "memory" in held:
            options["memory"] = held.pop("memory")
        if self._cluster.runtime_env:
            options["runtime_env"] = self._cluster.runtime_env
        where = PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
        actor: Any = ray.remote(EngineHost)
        return actor.options(scheduling_strategy=where, resources=held, **options).remote(), called

    async def _quietly(self, call: Callable[[], object]) -> None:
        """Call Ray while something ends: what it says of that is nobody's concern, and it gets little time."""
        try:
            await self._call(call, _CLOSE_S)
        except LaunchFailed:
            return

    async def _call(self, call: Callable[[], T], timeout_s: float = _ASK_S) -> T:
        """Call Ray in a thread; raises LaunchFailed."""
        where = f"Ray at {self._cluster.address}"
        try:
            result: T = await self._threads.call(call, timeout_s)
        except TimeoutError:
            raise LaunchFailed(f"{where} did not answer within {timeout_s:g} s") from None
        except NoThread as error:
            raise LaunchFailed(f"{where} does not answer: {error}") from error
        except LaunchFailed:
            raise
        except Exception as error:
            raise LaunchFailed(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        return result


def _remove(group: Any) -> None:
    import ray  # noqa: PLC0415 - as above

    ray.util.remove_placement_group(group)
