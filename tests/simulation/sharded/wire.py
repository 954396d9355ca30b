"""The shards as their coordinator reaches them: the protocol over a wire on which things go wrong.

Invariants:

- Calls of one kind arrive in the order they were made in, as an actor takes them; cancellations follow their calls.
- A call is to one life of a shard: one that finds another there has done nothing, and is `ShardLost`.
- A call ends with what the service answered or raised, or with `ShardLost`; a hung one when its caller has had enough.
- What a coordinator that was killed has asked for is dropped; what had begun is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rollout_svc.heavy import Heavy
from rollout_svc.packing.parts import Part
from rollout_svc.service import RolloutService
from rollout_svc.sharding.local import answer, lease, ready_groups, records
from rollout_svc.sharding.protocol import ShardLost
from tests.simulation.life import Gone
from tests.simulation.sharded.faults import CALLS, KILLS

if TYPE_CHECKING:
    from tests.simulation.sharded.front import Front
    from tests.simulation.sharded.host import Host

__all__ = ["SimLease", "SimShard"]

Work = Callable[[RolloutService], Coroutine[Any, Any, Any]]
_WAITING: Final = frozenset({"ready_groups", "update_weights", "evaluate"})  # they hold up no other
_OFTEN: Final = frozenset({"ready_groups", "status"})  # not worth a line
_ANSWER_S: Final = 30.0  # seconds for what a shard answers as soon as it can
_TRAVEL_S: Final = (0.0005, 0.01)


class SimLease:
    """Groups that a shard has leased."""

    def __init__(self, shard: SimShard, batch_id: str, count: int, metrics: Mapping[str, Any]) -> None:
        self.count = count
        self.metrics = metrics
        self._shard = shard
        self._batch_id = batch_id

    async def records(self) -> Sequence[bytes]:
        """See `Leased.records`."""
        if not self.count:
            return []

        async def read(service: RolloutService) -> list[bytes]:
            return records(service, self._batch_id)

        try:
            async with asyncio.timeout(_ANSWER_S):
                read_records: list[bytes] = await self._shard.ask("records", read)
        except TimeoutError:
            raise ShardLost(f"shard {self._shard.shard_id} did not answer records") from None
        return read_records

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        """None: no engine here gives any."""
        return {}

    async def part(self) -> Part:
        """Nothing: nobody packs a batch here."""
        return Part([], b"", b"")


class SimShard:
    """See the module's invariants.

    Attributes:
        life: see `Shard.life`.
        known: the life of the service that answered last.
    """

    def __init__(self, front: Front, host: Host) -> None:
        self.shard_id = host.shard_id
        self.life = 1
        self.known: int | None = None
        self._front = front
        self._host = host
        self._past: set[int] = set()
        self._last = {True: 0.0, False: 0.0}  # by whether it is a call that waits: when the last one arrives

    def __repr__(self) -> str:
        return f"<SimShard {self.shard_id} in life {self.life}>"

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        """See `Shard.ready_groups`."""
        ready: int = await self.ask("ready_groups", lambda service: ready_groups(service, step, wanted, timeout_s))
        return ready

    async def lease(self, step: int, at_most: int, batch_id: str) -> SimLease:
        """See `Shard.lease`."""
        batch = await self.ask("lease", lambda service: lease(service, step, at_most, batch_id))
        count, metrics = (0, {}) if batch is None else (len(batch.groups), batch.metrics)
        return SimLease(self, batch_id, count, metrics)

    async def give_back(self, batch_id: str) -> None:
        """See `Shard.give_back`."""
        await self.ask("give_back", lambda service: service.parts.batches.give_back(batch_id))

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """See `Shard.call`."""
        return await self.ask(name, lambda service: answer(service, name, given))

    async def ask(self, name: str, work: Work) -> Any:
        """Have it done in the life that is known."""
        world, front, known = self._front.world, self._front, self.known
        fault = world.faults.draw((*CALLS, *KILLS))
        if fault is not None:
            world.faults.once(fault)
            world.say("wire", f"{self.shard_id}.{name}", fault)
        if fault == "coordinator_before":
            await front.dies(fault)
        waits = name in _WAITING
        at = self.arrival(waits=waits, late=fault == "call_late")
        told: asyncio.Future[Any] = world.future()
        carry = world.spawn(self._carry(name, work, fault, known, at, told))
        front.carried[carry] = None
        carry.add_done_callback(lambda _: front.carried.pop(carry, None))
        self._say(name, "is asked")
        try:
            life, value, moved = await told
        except asyncio.CancelledError:
            self._say(name, "is left")
            world.later(max(0.0, self.arrival(waits=waits) - world.now), carry.cancel)
            raise
        if fault == "coordinator_after":
            await front.dies(fault)
        self._learn(life)
        if moved:
            self._lost("was lost, and lives anew: it is held")
        self._say(name, "answered")
        return value

    def _say(self, name: str, what: str) -> None:
        if name not in _OFTEN:
            self._front.world.say("wire", f"{self.shard_id}.{name}", what)

    def arrival(self, *, waits: bool, late: bool = False) -> float:
        """Say when what is sent now arrives: after what was sent before."""
        rng, now = self._front.world.rng, self._front.world.now
        travels = rng.choice((0.1, 1.0, 6.0)) * rng.random() if late else rng.uniform(*_TRAVEL_S)
        self._last[waits] = at = max(self._last[waits], now + travels)
        return at if not self._front.world.faults.healed else min(at, now + _TRAVEL_S[1])

    def hush(self, seconds: float) -> None:
        """Nothing arrives there for so long."""
        until = self._front.world.now + seconds
        self._last = {waits: max(last, until) for waits, last in self._last.items()}

    async def _carry(
        self, name: str, work: Work, fault: str | None, known: int | None, at: float, told: asyncio.Future[Any]
    ) -> None:
        """Take a call there, and its answer back."""
        world = self._front.world
        try:
            await world.at_most(max(0.0, at - world.now))
            await self._way_there(name, fault)
            answered = await self._at_work(name, work, fault, known)
            if fault in ("shard_after", "answer_lost"):
                self._lost(f"was lost before it answered {name}")
            if fault == "answer_late":
                await world.at_most(world.rng.choice((0.1, 1.0, 6.0)) * world.rng.random())
            else:
                await asyncio.sleep(world.rng.uniform(*_TRAVEL_S))
        except Gone:
            _fail(told, ShardLost(f"shard {self.shard_id} died"))
        except Exception as error:  # noqa: BLE001 - carried over to whoever asked
            _fail(told, error)
        else:
            if not told.done():
                told.set_result(answered)

    async def _way_there(self, name: str, fault: str | None) -> None:
        """What becomes of a call that never arrives."""
        if fault == "call_hung":
            await self._front.world.at_most(60.0)
            self._lost(f"did not answer {name}")
        if fault == "call_lost":
            self._lost("cannot be reached")
        if fault == "shard_before":
            self._host.kill(fault)
        if not self._host.alive:
            self._lost("cannot be reached: it is started again")

    async def _at_work(self, name: str, work: Work, fault: str | None, known: int | None) -> tuple[int, Any, bool]:
        """Have it done; returns in which life, its answer, and whether that life was another one."""
        host, world, life = self._host, self._front.world, self._host.life
        if known not in (None, life.number):
            return life.number, None, True
        if fault == "shard_during":
            world.later(world.rng.choice((0.0, 0.01, 0.2)) * world.rng.random(), host.kill, fault)
        try:
            return life.number, await life.call(name, lambda: work(life.service)), False
        finally:
            if fault == "shard_after":
                host.kill(fault)

    def _learn(self, life: int) -> None:
        """It answered in a life."""
        if life in self._past:
            self._lost("was lost, and its answer came late")
        if self.known is not None and self.known != life:
            self._past.add(self.known)
            self.life += 1
        self.known = life

    def _lost(self, how: str) -> NoReturn:
        raise ShardLost(f"shard {self.shard_id} {how}")


def _fail(told: asyncio.Future[Any], error: Exception) -> None:
    if not told.done():
        told.set_exception(error)
        told.exception()  # whoever asked may be gone
