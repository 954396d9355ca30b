"""One life of a coordinator, and the history's hold on it.

Invariant: what it does runs in the context of its life, so that `kill` ends all of it and no shard.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from rollout_svc.errors import NotNow
from rollout_svc.events import ComponentDied, Event, EventBus
from rollout_svc.sharding.coordinator import Coordinator
from tests.simulation.calls import Callee
from tests.simulation.sharded.wire import SimShard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.sharded.host import Host
    from tests.simulation.sharded.shape import ShardedShape
    from tests.simulation.world import World
    from tests.support.memory_notes import MemoryNotes

__all__ = ["Front"]


class Front(Callee):
    """A running coordinator.

    Attributes:
        coordinator: once it was made, which is in its own life.
        shards: as it reaches them.
        carried: what is on its way to them, and back.
    """

    coordinator: Coordinator

    def __init__(
        self,
        world: World,
        shape: ShardedShape,
        hosts: Sequence[Host],
        notes: MemoryNotes,
        number: int,
        died: Callable[[], None],
    ) -> None:
        super().__init__(world, number)
        self.shape = shape
        self.shards = [SimShard(self, host) for host in hosts]
        self._notes = notes
        self.carried: dict[asyncio.Task[Any], None] = {}
        self.made = False
        self._died = died
        self._ids = Random(f"{world.seed}:batches:{number}")

    async def start(self) -> None:
        """Make the coordinator, and let it look for its shards; returns when it is ready, or has waited for long."""
        bus = EventBus(on_error=self._bus_error)
        bus.subscribe(ComponentDied, self._component_died)
        book = self._notes.book()
        self.coordinator = Coordinator(
            self.shape.config, self.shards, bus=bus, book=book, new_id=lambda: f"{self._ids.getrandbits(64):016x}"
        )
        self.made = True
        await self.coordinator.start()
        try:
            await self.coordinator.ready()
        except NotNow as error:
            self.world.say("front", "is not ready", error)

    def _bus_error(self, event: Event, error: Exception) -> None:
        self.world.breaks("bus", f"{event!r}: {error!r}")

    def _component_died(self, event: ComponentDied) -> None:
        self.world.breaks("bug", f"{event.component} died: {event.error}\n{event.traceback}")

    def kill(self, why: str) -> None:
        """End it as `kill -9` does."""
        if not self.up:
            return
        self.world.say("front", "is killed", why)
        self.up = False
        self.world.loop.kill(self.number)
        for carry in tuple(self.carried):
            carry.cancel()
        self.leave_callers()
        self._died()

    async def dies(self, why: str) -> None:
        """Be killed from within: the caller runs no line more."""
        self.world.later(0.0, self.kill, why)
        await asyncio.get_running_loop().create_future()
