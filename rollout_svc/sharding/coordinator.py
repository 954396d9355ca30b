"""Several services that are one to a trainer: the calls of `RolloutService`, over shards.

Invariants:

- One ticket, one pause under one deadline, one version of weights, one ledger that sums; workers are called `s0.w1`.
- No call waits for a shard beyond its own deadline; who is lost, silent or odd is out of step, held and named.
- Whoever calls from outside meets the errors of the service; `ShardLost` stays in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from rollout_svc.batch import Shortage, is_ahead, too_far
from rollout_svc.config import Config, WorkerConfig
from rollout_svc.errors import Conflict, NotFound, NotNow, RolloutError
from rollout_svc.events import ComponentDied, EventBus
from rollout_svc.gate import LANES, Lane
from rollout_svc.packing.parts import unreadable
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.request import Asked
from rollout_svc.service import State
from rollout_svc.sharding.batch import MergedBatch
from rollout_svc.sharding.book import Book
from rollout_svc.sharding.dealing import Dealing
from rollout_svc.sharding.fleet import FannedFleet, Trainer, divide_trainer, seen
from rollout_svc.sharding.keeping import Keeper
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members
from rollout_svc.sharding.pausing import FannedPause
from rollout_svc.sharding.protocol import Shard, ShardLost
from rollout_svc.sharding.records import merge_status
from rollout_svc.sharding.taking import FannedBatches
from rollout_svc.sharding.updating import FannedWeights
from rollout_svc.tasks import TaskOwner
from rollout_svc.tensors import Loan, ReadHandle

__all__ = ["Coordinator"]

_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message
_ANSWER_S: Final = 5.0  # seconds a shard has for an answer that nothing is waited for


class Coordinator:
    """The calls of `RolloutService` over shards that are made already. All in the loop `start` ran in."""

    def __init__(
        self,
        config: Config,
        shards: Sequence[Shard],
        *,
        bus: EventBus | None = None,
        book: Book | None = None,
        new_id: Callable[[], str] = lambda: uuid4().hex,
        divide: Callable[[Config, Trainer, Mapping[str, int]], Mapping[str, Trainer]] = divide_trainer,
    ) -> None:
        """Take the shards; asks them nothing yet.

        Args:
            config: the settings of the whole.
            shards: in their order.
            bus: where events go; None: nowhere.
            book: what is to outlive this coordinator beside the shards' journals; None: nothing is.
            new_id: gives unique ids for batches.
            divide: gives each shard its part of a trainer's numbers.
        """
        self.config = config
        self.bus = bus or EventBus()
        self.failure: ComponentDied | None = None
        self.bound: str | None = None
        self.survivors: tuple[str, ...] = ()
        self.recovered: dict[str, int] = {}
        self._phase = "new"
        self._waited = False  # somebody waited for all of them
        self._resuming = 0
        self._tasks = TaskOwner(self._died)
        journal = config.buffer.path is not None
        self.members = Members(Member(s, self._tasks, journal=journal, changed=self._changed) for s in shards)
        self.pauses = FannedPause(self.members, self._tasks, config.pause)
        self.weights = FannedWeights(self.members, self._tasks, self.pauses, config, resume=self._let_go)
        book = book or Book()
        book.on_failure = lambda error: self._died("book", error, critical=True)
        self.batches = FannedBatches(
            self.members,
            self._tasks,
            book=book,
            lease_s=config.buffer.lease_s,
            answer_s=config.pause.deadline_s,
            new_id=new_id,
            paused_s=lambda: self.pauses.paused_s,
            paused=lambda: "train" in self.pauses.closed,
            ahead=self._ahead,
            check=self._check_alive,
        )
        self.fleet = FannedFleet(self.members, config, divide)
        self.dealing = Dealing(self.members, config)
        self._keeper = Keeper(self.pauses, self.weights, config.pause.deadline_s, self.batches.returned)
        self._stirred = asyncio.Event()

    @property
    def state(self) -> State:
        """Where the service stands."""
        if self.failure is not None:
            return "failed"
        if self._phase in ("stopping", "stopped"):
            return "stopping"
        if self._phase != "running":
            return "starting"
        return "resuming" if self._resuming and self.pauses.state == "paused" else self.pauses.state

    async def start(self) -> None:
        """Begin to look after the shards; returns at once."""
        if self._phase == "new":
            self._phase = "starting"
            for member in self.members.all:
                self._tasks.spawn(f"{member.shard_id}:keep", self._keeper.keep(member), critical=True)

    async def ready(self) -> None:
        """Wait until every shard is in step, `start_timeout_s` at most.

        Raises:
            ConfigError: one never can be: its journal is another's, or its settings do not work there.
            NotNow: some are not; they are named, and brought in as soon as they can be.
        """
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                while outside := self.members.outside:
                    self._check_alive()
                    if refused := next((member.refused for member in outside if member.refused is not None), None):
                        raise refused
                    self._stirred.clear()
                    await self._stirred.wait()
        except TimeoutError:
            told = "; ".join(f"{member.shard_id}: {member.why}" for member in self.members.outside)
            raise NotNow("starting", f"shards are not in step: {told}") from None
        finally:
            self._waited = True
            self._changed()

    async def stop(self) -> None:
        """Hold every shard, and end what is kept here; the shards are ended by whoever made them."""
        if self._phase in ("new", "stopped"):
            self._phase = "stopped"
            return
        self._phase = "stopping"
        self.batches.wake()
        until = _now() + self.config.pause.deadline_s
        given = {"mode": "abort", "deadline_s": self.config.pause.deadline_s, "lanes": list(LANES)}
        await self.members.fan(self.members.inside, lambda member: member.pause(given, until))
        self.batches.close()
        self.survivors = await self._tasks.close(_now() + _ANSWER_S)
        self._phase = "stopped"

    def _died(self, name: str, error: BaseException, critical: bool) -> None:
        event = ComponentDied.of(name, error)
        if critical and self.failure is None:
            self.failure = event
            self._changed()
        self.bus.emit(event)

    def _changed(self) -> None:
        if self._phase == "starting" and self._waited and self.members.inside:
            self._phase = "running"  # with those that are there: also where the first of them came too late
        self._stirred.set()
        self.batches.wake()

    def _check_alive(self) -> None:
        if self.failure is not None:
            died = self.failure
            raise NotNow("failed", f"{died.component} died: {died.error}", detail={"traceback": died.traceback})
        if self._phase in ("stopping", "stopped"):
            raise NotNow("stopping", "the service is stopping")

    def _check_running(self) -> None:
        self._check_alive()
        if self._phase != "running":
            told = "; ".join(f"{member.shard_id}: {member.why}" for member in self.members.outside)
            raise NotNow("starting", f"shards are not in step: {told}")

    # -- pause, resume, weights ------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        mode: str | None = None,
        deadline_s: float | None = None,
        lanes: Iterable[Lane] = LANES,
        if_ticket: int | None = None,
        kv: str = "keep",
        offload: Iterable[str] = (),
    ) -> PauseReport:
        """Stop every shard; returns by the deadline with one report. See `RolloutService.pause`."""
        self._check_running()
        return await self.pauses.pause(Asked(mode, deadline_s, tuple(lanes), if_ticket, kv, tuple(offload)))

    async def resume(self, *, ticket: int | None = None, weight_version: int | None = None) -> dict[str, Any]:
        """Open every shard in step; waits for a pause under way. See `RolloutService.resume`."""
        self._check_running()
        self.pauses.check_resume(ticket)
        self._resuming += 1
        try:
            while True:
                await self.pauses.settled()
                if self.weights.updating is not None:
                    await asyncio.wait({self.weights.updating})
                if weight_version is not None:
                    await self.fleet.refresh(self.members.inside)
                if self.pauses.climbing is None and self.weights.updating is None:
                    break
            # What was awaited may have changed everything: looked at again in the step that opens.
            self._check_alive()
            self.pauses.check_resume(ticket)
            if weight_version is not None:
                self._assert_version(weight_version)
            await self._let_go(weight_version)
        finally:
            self._resuming -= 1
        return await self.status()

    async def _let_go(self, weight_version: int | None = None) -> None:
        """Open every shard in step; who cannot be told is out of step, and another that refuses is why nobody opens."""
        if self.pauses.state == "running":
            return
        held, until = self.members.inside, _now() + self.config.pause.deadline_s
        self.pauses.let_go()
        opened = await self.members.fan(held, lambda member: member.open(until, weight_version))
        for member in held:
            outcome = opened[member.shard_id]
            if isinstance(outcome, RolloutError) and member.inside:
                member.fall(str(outcome))
        for member in self.members.outside:
            member.wake.set()

    def _assert_version(self, version: int) -> None:
        reported = {
            f"{member.shard_id}.{worker['id']}": worker["weight_version"]
            for member in self.members.inside
            for worker in (member.known or {}).get("workers", [])
            if worker["state"] == "ACTIVE"
        }
        if self.weights.version != version or any(label not in (version, None) for label in reported.values()):
            raise Conflict(
                f"not every worker in traffic reports weight version {version}",
                type="weight_version",
                detail={"weight_version": version, "workers": reported},
            )

    async def update_weights(
        self, version: int, source: Mapping[str, Any], pause: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> dict[str, Any]:
        """Bring every shard to `version`; see `RolloutService.update_weights`.

        Also while not all of them are in step: it may be these weights that one of the others waits for.
        """
        if self.members.inside:
            self._check_alive()
        else:
            self._check_running()
        return await self.weights.update(version, source, pause, force=force)

    # -- batches, prompts, evaluations -----------------------------------------------------------------------

    async def take_batch(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> dict[str, Any]:
        """Lease a batch, as its record; see `RolloutService.take_batch`."""
        batch = await self.lease_batch(step, groups, timeout_s, ack)
        try:
            return await batch.as_json()
        except ShardLost as lost:
            raise unreadable(batch.batch_id, lost) from lost

    def _ahead(self, step: int) -> Shortage | None:
        trainer = self.config.trainer
        stands = step, self.weights.version, trainer.max_staleness, trainer.max_token_staleness
        return too_far(*stands) if is_ahead(*stands) else None

    async def lease_batch(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> MergedBatch:
        """Lease a batch, still where its groups lie: for whoever sends it on."""
        self._check_alive()
        return await self.batches.take(step, groups, timeout_s, ack)

    async def experts_of(self, sample_id: str) -> ReadHandle:
        """The routed experts of one sample that is lent, where they lie; see `Batches.experts_of`.

        Raises:
            NotFound: no batch that is lent has such a sample; `no_experts`: it has none.
            NotNow: it may be in a shard that is lost.
        """
        for batch in self.batches.lent:
            try:
                found = await batch.experts_of(sample_id)
            except ShardLost as lost:
                raise unreadable(batch.batch_id, lost) from lost
            if found is not None:
                return ReadHandle(sample_id, found, Loan())
        raise NotFound(f"no batch that is lent has a sample {sample_id[:_ECHO_CHARS]!r}")

    async def ack(self, batch_id: str) -> dict[str, Any]:
        """Consume a leased batch for good."""
        self._check_alive()
        return await self.batches.acknowledge(batch_id)

    async def put_prompts(self, task: str, prompts: list[Any]) -> dict[str, int]:
        """Add prompts to a task that is fed by push; see `Dealing.put_prompts`."""
        self._check_alive()
        return await self.dealing.put_prompts(task, prompts)

    async def evaluate(
        self,
        task: str,
        prompts: Sequence[Any],
        *,
        sampling: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Have prompts answered and judged in lane `eval`; see `Dealing.evaluate`."""
        self._check_running()
        return await self.dealing.evaluate(task, prompts, {"sampling": sampling, "version": version}, timeout_s)

    async def checkpoint(self, path: str, step: int, ack: Iterable[str] = ()) -> dict[str, Any]:
        """Write a snapshot of every shard, each in a file of its own: `path` with its name behind it."""
        self._check_alive()
        expired = await self.batches.acknowledge_all(ack)
        record = await self.dealing.checkpoint(path, step)
        return record | ({"ack_expired": list(expired)} if expired else {})

    # -- workers, and what is told ---------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """The record of all shards as one; of one that does not answer, what it said last."""
        asked = [member for member in self.members.all if member.shard.life == member.life or member.known is None]
        await self.fleet.refresh(asked)
        return self.known_status()

    def known_status(self) -> dict[str, Any]:
        """The same, of what the shards said last: for whoever cannot wait.

        Raises:
            NotNow: no shard has ever answered.
        """
        known = {member.shard_id: seen(member) for member in self.members.all if member.known is not None}
        if not known:
            raise NotNow("starting", "no shard has answered yet")
        own = {
            "state": self.state,
            "ticket": self.pauses.ticket,
            "weight_version": self.weights.version,
            "weights_error": self.weights.error,
            "lanes": [lane for lane in LANES if self._phase == "running" and lane not in self.pauses.closed],
            "leases": self.batches.leases,
            "shards": [member.as_json() for member in self.members.all],
        }
        return merge_status(known, own, self.members.ledger)

    async def workers(self) -> list[dict[str, Any]]:
        """Every worker's record."""
        return await self.fleet.workers()

    async def stuck(self, older_than_s: float | None = None) -> dict[str, Any]:
        """Who has been under way for longer than that, and where."""
        return await self.fleet.stuck(older_than_s)

    async def memory(self) -> dict[str, Any]:
        """What every process has; see `RolloutService.memory`."""
        return await self.fleet.memory()

    async def concurrency(self) -> dict[str, Any]:
        """The plan in force."""
        return await self.fleet.concurrency()

    async def set_concurrency(
        self, trainer: Mapping[str, Any] | None = None, limits: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """Follow other numbers of the trainer's, or set workers' limits by hand."""
        self._check_alive()
        return await self.fleet.set_concurrency(trainer or {}, limits or {})

    async def add_worker(self, config: WorkerConfig) -> dict[str, Any]:
        """Add an engine to the shard in step that has the fewest."""
        self._check_alive()
        return await self.fleet.add_worker(config)

    async def remove_worker(self, worker_id: str) -> dict[str, Any]:
        """Take an engine out of its shard; what it runs may finish first."""
        self._check_alive()
        return await self.fleet.remove_worker(worker_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
