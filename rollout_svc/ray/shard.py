"""A shard in an actor, and the protocol over its handle.

Invariants:

- A shard's actor, and so its engines, end with the process that made it; until then Ray starts it again, on the same
  node, where its journal is.
- A call is to one life of the shard: one that finds another there has done nothing, and is `ShardLost`. So whoever
  asks learns of a restart before it is answered by what came of it.
- Every call ends: where the actor has died, is started again, does not answer in time, or fails with what is no error
  of ours, with `ShardLost`.
- Routed experts go to whoever asks as references into Ray's store, put there in a thread: their bytes pass through no
  loop, and belong to this shard's process.
- A call whose caller is cancelled is cancelled in the actor.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from rollout_svc.config import Config, Portion
from rollout_svc.errors import RolloutError
from rollout_svc.heavy import Heavy
from rollout_svc.hosting import hosted
from rollout_svc.packing.parts import Part, part_of
from rollout_svc.ray.batch import lend
from rollout_svc.ray.lasting import stop_s
from rollout_svc.ray.making import Making
from rollout_svc.ray.thread import ServiceThread
from rollout_svc.service import RolloutService
from rollout_svc.sharding.local import answer, experts_of, lease, ready_groups, records
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.split import ShardSettings, split
from rollout_svc.tensors.ray_connection import first_line

__all__ = ["RayLease", "RayShard", "ShardActor", "ray_shards"]

T = TypeVar("T")

_GROUPS: Final = {"control": 64, "waiting": 256}  # calls that are answered at once; those that wait have their own
_WAITING: Final = ("ready_groups", "wait", "experts", "part")
_ANSWER_S: Final = 30.0  # seconds for what a shard answers as soon as it can
_COPY_S: Final = 60.0  # seconds for it to have a batch's tensors in Ray's store, which may have to make room first
_MARGIN_S: Final = 10.0  # seconds beyond the time that a call was given
_STOP_S: Final = 5.0  # seconds beyond what its service may take for an actor to hear of its stop, and to answer


class Told(NamedTuple):
    """What an actor answers.

    Attributes:
        life: of the actor's process.
        value: the answer; None where the call was to another life.
        moved: whether it was.
    """

    life: str
    value: Any
    moved: bool = False


class ShardActor:
    """A service that is a shard, in an actor."""

    def __init__(self, config: Config, portion: Portion) -> None:
        """Start it; until it is made every call raises what keeps it from that."""
        self._life = secrets.token_hex(8)
        self._making = Making(
            lambda: ServiceThread(config, host=lambda config: hosted(config, "info", portion=portion))
        )

    async def _told(self, life: str | None, call: Coroutine[Any, Any, T]) -> Told:
        """Make a call in the service's loop, if it is to this life."""
        if life not in (None, self._life):
            call.close()
            return Told(self._life, None, moved=True)
        try:
            made = self._making.get()
        except BaseException:
            call.close()
            raise
        return Told(self._life, await made.ask(call))

    @property
    def _service(self) -> RolloutService:
        return self._making.get().service

    async def ready_groups(self, life: str | None, step: int, wanted: int, timeout_s: float) -> Told:
        """See `Shard.ready_groups`."""
        return await self._told(life, ready_groups(self._service, step, wanted, timeout_s))

    async def lease(self, life: str | None, step: int, at_most: int, batch_id: str) -> Told:
        """See `Shard.lease`; tells how many groups, their figures, and whether they have routed experts."""
        return await self._told(life, _leased(self._service, step, at_most, batch_id))

    async def records(self, life: str | None, batch_id: str) -> Told:
        """The records of a lease that is in force."""
        return await self._told(life, _records(self._service, batch_id))

    async def experts(self, life: str | None, batch_id: str, sample_id: str | None) -> Told:
        """The routed experts of a lease that is in force, where Ray has them."""
        told = await self._told(life, _later(self._service, batch_id, sample_id))
        return told if told.moved else told._replace(value=await asyncio.to_thread(lend, told.value))

    async def part(self, life: str | None, batch_id: str) -> Told:
        """What is to be packed of a lease that is in force; routed experts as above."""
        told = await self._told(life, _part(self._service, batch_id))
        if told.moved:
            return told
        part, names, later = told.value
        lent = await asyncio.to_thread(lend, later)
        rows = [row._replace(experts=lent.get(name)) for name, row in zip(names, part.rows, strict=True)]
        return told._replace(value=part._replace(rows=rows))

    async def give_back(self, life: str | None, batch_id: str) -> Told:
        """See `Shard.give_back`."""
        return await self._told(life, self._service.parts.batches.give_back(batch_id))

    async def call(self, life: str | None, name: str, given: Mapping[str, Any]) -> Told:
        """See `Shard.call`."""
        return await self._told(life, answer(self._service, name, given))

    async def wait(self, life: str | None, name: str, given: Mapping[str, Any]) -> Told:
        """The same of a call that may take long: it holds up no other."""
        if name != "ready":
            return await self._told(life, answer(self._service, name, given))
        told = await self._told(life, asyncio.sleep(0))
        if told.moved:
            return told
        return told._replace(value=await asyncio.shield(asyncio.wrap_future(self._making.get().ready)))

    async def stop(self) -> None:
        """Drain under the pause deadline, and end everything but the actor."""
        if (made := self._making.stop()) is not None:
            await asyncio.shield(asyncio.wrap_future(made.stop()))


async def _leased(
    service: RolloutService, step: int, at_most: int, batch_id: str
) -> tuple[int, Mapping[str, Any], bool]:
    batch = await lease(service, step, at_most, batch_id)
    return (0, {}, False) if batch is None else (len(batch.groups), batch.metrics, bool(experts_of(batch, None)))


async def _later(service: RolloutService, batch_id: str, sample_id: str | None) -> dict[str, Callable[[], Any]]:
    """What reads the routed experts of a lease that is in force, whatever becomes of it."""
    batch = service.parts.batches.lent(batch_id)
    return {name: heavy.later() for name, heavy in experts_of(batch, sample_id).items()}


async def _part(service: RolloutService, batch_id: str) -> tuple[Part, list[str], dict[str, Callable[[], Any]]]:
    """What is to be packed of a lease that is in force, whose sample each row is, and what reads its routed experts."""
    batch = service.parts.batches.lent(batch_id)
    names = [sample.sample_id for group in batch.groups for sample in group.samples]
    return part_of(batch), names, {name: heavy.later() for name, heavy in experts_of(batch, None).items()}


async def _records(service: RolloutService, batch_id: str) -> list[bytes]:
    return records(service, batch_id)


class RayLease:
    """Groups that a shard in an actor has leased.

    Attributes:
        count: how many.
        metrics: their figures; none where there are no groups.
    """

    __slots__ = ("_batch_id", "_routed", "_shard", "count", "metrics")

    def __init__(self, shard: RayShard, batch_id: str, count: int, metrics: Mapping[str, Any], *, routed: bool) -> None:
        self.count = count
        self.metrics = metrics
        self._shard = shard
        self._batch_id = batch_id
        self._routed = routed

    def __repr__(self) -> str:
        return f"<RayLease of {self.count} at {self._shard!r}>"

    async def records(self) -> Sequence[bytes]:
        """The groups' records; see `Leased.records`."""
        if not self.count:
            return []
        records: list[bytes] = await self._shard.ask("records", self._batch_id, within_s=_ANSWER_S)
        return records

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        """Routed experts, as references into Ray's store; see `Leased.experts`."""
        if not self._routed and sample_id is None:
            return {}
        lent: dict[str, Heavy] = await self._shard.ask("experts", self._batch_id, sample_id, within_s=_COPY_S)
        return lent

    async def part(self) -> Part:
        """What is to be packed, routed experts as references; see `Leased.part`."""
        if not self.count:
            return Part([], b"", b"")
        part: Part = await self._shard.ask("part", self._batch_id, within_s=_COPY_S)
        return part


class RayShard:
    """The protocol over an actor's handle.

    Attributes:
        actor: the handle.
        life: see `Shard.life`.
    """

    def __init__(self, shard_id: str, actor: Any, config: Config) -> None:
        self.shard_id = shard_id
        self.actor = actor
        self.life = 1
        self._known: str | None = None
        self._past: set[str] = set()
        self._config = config

    def __repr__(self) -> str:
        return f"<RayShard {self.shard_id} in life {self.life}>"

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        """See `Shard.ready_groups`."""
        ready: int = await self.ask("ready_groups", step, wanted, timeout_s, within_s=timeout_s + _MARGIN_S)
        return ready

    async def lease(self, step: int, at_most: int, batch_id: str) -> RayLease:
        """See `Shard.lease`."""
        count, metrics, routed = await self.ask("lease", step, at_most, batch_id, within_s=_ANSWER_S)
        return RayLease(self, batch_id, count, metrics, routed=routed)

    async def give_back(self, batch_id: str) -> None:
        """See `Shard.give_back`."""
        await self.ask("give_back", batch_id, within_s=_ANSWER_S)

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """See `Shard.call`."""
        long, within_s = self._bound(name, given)
        return await self.ask("wait" if long else "call", name, dict(given), within_s=within_s)

    def _bound(self, name: str, given: Mapping[str, Any]) -> tuple[bool, float]:
        """Whether a call may wait for what takes long, and how long it may take."""
        deadline_s = self._config.pause.deadline_s
        match name:
            case "pause":
                return False, (given.get("deadline_s") or deadline_s) + _MARGIN_S
            case "resume":  # it waits for a pause under way, and for engines that wake
                return False, deadline_s + self._config.request_timeout_s + _MARGIN_S
            case "evaluate":
                return True, float(given["timeout_s"]) + _MARGIN_S
            case "ready":
                return True, self._config.start_timeout_s + _MARGIN_S
            case "update_weights":  # staged, swapped in, confirmed; or taken back
                step_s = self._config.weights.update_timeout_s or self._config.request_timeout_s
                return True, deadline_s + 4 * step_s + _MARGIN_S
        return False, _ANSWER_S

    async def ask(self, name: str, *arguments: Any, within_s: float) -> Any:
        """Call a method of the actor, in the life that is known.

        Raises:
            ShardLost: it did not answer, or lives anew.
        """
        import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

        reference = getattr(self.actor, name).remote(self._known, *arguments)
        try:
            async with asyncio.timeout(within_s):
                told: Told = await asyncio.wrap_future(reference.future())
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RolloutError):
                raise error.cause from None
            raise ShardLost(f"shard {self.shard_id}: {type(error.cause).__name__}: {first_line(error)}") from error
        except TimeoutError:
            ray.cancel(reference)
            raise ShardLost(f"shard {self.shard_id} did not answer {name} within {within_s:g} s") from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise ShardLost(f"shard {self.shard_id}: {type(error).__name__}") from error
        if told.life in self._past:  # an answer that was on its way: it says nothing of who lives now
            raise ShardLost(f"shard {self.shard_id} was lost, and its answer came late")
        if self._known is not None and self._known != told.life:
            self._past.add(self._known)
            self.life += 1
        self._known = told.life
        if told.moved:
            raise ShardLost(f"shard {self.shard_id} was lost, and lives anew: it is held")
        return told.value

    async def stop(self) -> None:
        """Drain the shard, and end its actor for good; idempotent."""
        import ray  # noqa: PLC0415 - as above

        reference = self.actor.stop.remote()
        waiting = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait({waiting}, timeout=stop_s(self._config) + _STOP_S)
        finally:
            waiting.cancel() if not waiting.done() else waiting.exception()
            ray.kill(self.actor, no_restart=True)


@asynccontextmanager
async def ray_shards(config: Config) -> AsyncIterator[list[RayShard]]:
    """Have an actor for each of `producer.shards`; all of them have ended when the block is over.

    Raises:
        ConfigError: the settings cannot be divided so.
    """
    parts = split(config)
    shards = await asyncio.to_thread(_made, parts)
    try:
        yield shards
    finally:
        await asyncio.gather(*(shard.stop() for shard in shards))


def _made(parts: Sequence[ShardSettings]) -> list[RayShard]:
    """Make the actors; may block, while Ray is told what they are."""
    import ray  # noqa: PLC0415 - as above
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    for name in ("ready_groups", "lease", "records", "experts", "part", "give_back", "call", "wait", "stop"):
        group = "waiting" if name in _WAITING else "control"
        ray.method(concurrency_group=group)(getattr(ShardActor, name))
    remote: Any = ray.remote
    actors = remote(concurrency_groups=dict(_GROUPS))(ShardActor)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0, "scheduling_strategy": here}
    return [
        RayShard(part.shard_id, actors.options(**options).remote(part.config, part.portion), part.config)
        for part in parts
    ]
