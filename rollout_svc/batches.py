"""What a trainer takes: batches under lease, acknowledged once.

Invariants:

- Only COMPLETED groups within the staleness bound leave here; what is too old is settled EXPIRED and counted. Tokens
  beyond the bound of their own are masked in what is sent, not in what is kept.
- The tasks of a batch are mixed by their weights (`producer/mix.py`).
- A batch is leased in one step, once all its groups are there: a caller that goes away before loses nothing, and one
  that goes away after gets the same batch by asking for the same step.
- A take that cannot be met says why within its timeout, and a dead service fails every take at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from rollout_svc.batch import Batch, Shortage, check_take, is_ahead, not_now, too_far
from rollout_svc.batch_figures import Figures
from rollout_svc.buffer.replay import Lease, ReplayBuffer
from rollout_svc.buffer.storage import Storage
from rollout_svc.errors import Conflict, NotFound
from rollout_svc.events import BatchAcked, BatchTaken, EventBus, LeaseExpired
from rollout_svc.group import Group
from rollout_svc.producer.masking import oldest_unmasked, spent
from rollout_svc.producer.mixture import Mixture
from rollout_svc.producer.schedule import Demand
from rollout_svc.producer.staleness import refusal
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.tensors import ReadHandle

__all__ = ["Batch", "Batches"]

_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message


class Batches:
    """Takes, leases and acks."""

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        tally: Tally,
        bus: EventBus,
        storage: Storage,
        settling: Settling,
        mixture: Mixture,
        lease_s: float,
        max_staleness: int,
        max_token_staleness: int | None,
        version: Callable[[], int],
        hopeless: Callable[[int], bool],
        shortage: Callable[[int], Shortage],
        paused_s: Callable[[], float],
        on_demand: Callable[[], None],
        new_id: Callable[[], str],
    ) -> None:
        self.max_staleness = max_staleness
        self.max_token_staleness = max_token_staleness
        self._buffer = buffer
        self._tally = tally
        self._bus = bus
        self._storage = storage
        self._settling = settling
        self._mixture = mixture
        self._lease_s = lease_s
        self._new_id = new_id
        self._version = version
        self._hopeless = hopeless
        self._shortage = shortage
        self._on_demand = on_demand
        self._next_step: int | None = None  # after the last lease
        self._known_step: int | None = None  # after the steps of an earlier life, until a batch is lent in this one
        self._leased: dict[str, Batch] = {}
        self._figures = Figures(tally, paused_s)
        self._takers: dict[asyncio.Event, tuple[int, int]] = {}
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        buffer.subscribe(self.wake)

    def wake(self) -> None:
        """Something changed: let those who wait look again."""
        for taker in self._takers:
            taker.set()

    async def take(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> Batch:
        """Lease a batch of `groups` groups for `step`; the same step again gives the same batch while it is leased.

        Args:
            step: trainer steps done so far, counted from `trainer.initial_version`.
            groups: how many groups.
            timeout_s: how long to wait for them.
            ack: batches to acknowledge first; those whose lease has ended come back in `ack_expired`.

        Raises:
            BadRequest: a number that means nothing; nothing has changed.
            NotNow: `not_enough`, `paused`, `exhausted` or `failed`, with the reason.
        """
        check_take(step, groups, timeout_s)
        started = asyncio.get_running_loop().time()
        expired = self.acknowledge_all(ack)
        again = self._buffer.leased_at(step)
        if again is not None:  # it waits for nobody, so not for its turn either
            batch = self._leased[again.batch_id]
            if await self._durable(batch):
                return replace(batch, ack_expired=expired)
        wake = asyncio.Event()
        self._ask(wake, step, groups)
        try:
            while True:
                async with asyncio.timeout_at(started + timeout_s), self._turn:
                    batch = await self._take(step, groups, started, wake)
                self._ask_no_more(wake)
                if await self._durable(batch):  # it is lent: the time for that does not count
                    return replace(batch, ack_expired=expired)
                self._ask(wake, step, groups)
        except TimeoutError:
            stands = step, self._version(), self.max_staleness, self.max_token_staleness
            shortage = too_far(*stands) if is_ahead(*stands) else self._short(groups)
            raise not_now(shortage, groups, self._buffer.ready) from None
        finally:
            self._ask_no_more(wake)

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        """Say how many groups may be handed over at `step`; waits until they are `wanted`, or the time is up.

        Who waits here is waited for as a take is: for a batch of `wanted` groups at `step`. Who has no time
        only looks, and is told a number whatever may come.

        Raises:
            NotNow: that can never be, and no more will come; `detail` says how many are `ready`.
        """
        check_take(step, wanted, timeout_s)
        if timeout_s > 0:
            await self._wait_for(step, wanted, timeout_s)
        ready = len(self._mixture.most(wanted, self._fresh(step)))
        if timeout_s > 0 and ready < wanted and self._over(wanted):
            raise not_now(self._shortage(wanted), wanted, ready)
        return ready

    async def _wait_for(self, step: int, wanted: int, timeout_s: float) -> None:
        self._mixture.groups = wanted
        ready = len(self._mixture.most(wanted, self._fresh(step)))
        wake = asyncio.Event()
        self._ask(wake, step, wanted)
        try:
            async with asyncio.timeout(timeout_s):
                while ready < wanted and not self._over(wanted):
                    wake.clear()
                    await wake.wait()
                    if self._buffer.ready >= wanted:  # else nobody has to look through them
                        ready = len(self._mixture.most(wanted, self._fresh(step)))
        except TimeoutError:
            pass
        finally:
            self._ask_no_more(wake)

    def _over(self, wanted: int) -> bool:
        """Whether what is ready is all there will be of so many groups."""
        return self._hopeless(wanted) and (not self._mixture.under_way or self._shortage(wanted).type == "failed")

    async def lease(self, step: int, at_most: int, batch_id: str) -> Batch | None:
        """Lease what of a batch is ready, under an id of the caller's; None: nothing is, and nothing was leased.

        Args:
            step: see `take`.
            at_most: how many groups.
            batch_id: no other batch's; the same again: the same groups, while they are leased.

        Raises:
            Conflict: that lease has ended, or was acknowledged.
        """
        check_take(step, at_most, 0.0)
        batch = self._leased.get(batch_id)
        if batch is None:
            if (fate := self._buffer.fate(batch_id)) is not None:
                raise Conflict(f"the lease of batch {batch_id} has ended: {fate}", type="lease_expired")
            chosen = self._mixture.most(at_most, self._fresh(step))
            self._next_step, self._known_step = step + 1, None  # of the batch, which the caller has either way
            if not chosen:
                return None
            batch = self._lease(step, chosen, asyncio.get_running_loop().time(), batch_id)
        await self._storage.flush()
        return batch

    def lent(self, batch_id: str) -> Batch:
        """The batch that is lent under this id; leases nothing.

        Raises:
            Conflict: none is.
        """
        batch = self._leased.get(batch_id)
        if batch is None:
            raise Conflict(f"the lease of batch {batch_id} has ended", type="lease_expired")
        return batch

    async def give_back(self, batch_id: str) -> None:
        """End a lease as if its time had passed; nothing where there is none."""
        self._end(self._buffer.give_back(batch_id))
        await self._storage.flush()

    def _ask(self, wake: asyncio.Event, step: int, groups: int) -> None:
        """Have the producer know who waits, and for what."""
        self._takers[wake] = step, groups
        self._on_demand()

    def _ask_no_more(self, wake: asyncio.Event) -> None:
        if self._takers.pop(wake, None) is not None:
            self._on_demand()

    async def _durable(self, batch: Batch) -> bool:
        """Wait until a lease is durable; returns whether it is still in force, and not acknowledged or ended by now."""
        await self._storage.flush()  # a batch that a crash forgot would be handed out a second time
        return batch.batch_id in self._leased

    async def _take(self, step: int, groups: int, started: float, wake: asyncio.Event) -> Batch:
        self._fresh(step)  # what is too old for it holds room that others need
        self._mixture.groups = groups
        while True:
            again = self._buffer.leased_at(step)
            if again is not None:
                return self._leased[again.batch_id]
            fresh: list[Group] = []
            mixed = self._buffer.ready >= groups and not self._mixture.missing(groups)
            if mixed or self._buffer.full:  # where it is full only what is too old makes room
                fresh = self._fresh(step)
                chosen = self._mixture.choose(groups, fresh)
                if chosen is not None:
                    return self._lease(step, chosen, started)
            if self._hopeless(groups):
                raise not_now(self._shortage(groups), groups, len(fresh) or self._buffer.ready)
            wake.clear()
            await wake.wait()

    def _short(self, groups: int) -> Shortage:
        """Why the batch is not there; where enough is ready, which tasks it waits for."""
        shortage, missing = self._shortage(groups), self._mixture.missing(groups)
        return shortage if self._buffer.ready < groups else shortage.of_tasks(missing)

    @property
    def demand(self) -> Demand:
        """What is waited for, as the schedule counts it."""
        version = self._version()
        if self._takers:
            takers = self._takers.values()
            return Demand(version, min(step for step, _ in takers), max(groups for _, groups in takers))
        after = max((lease.step + 1 for lease in self._buffer.leases), default=version)
        step = max(version, after if self._next_step is None else self._next_step)
        return Demand(version, step if self._known_step is None else min(step, self._known_step))

    async def acknowledge(self, batch_id: str) -> dict[str, Any]:
        """Consume a batch for good; acknowledging it twice is the same as once.

        Raises:
            Conflict: its lease has ended; its groups went back.
            NotFound: there never was such a batch.
        """
        if self._acknowledge(batch_id):
            await self._storage.flush()
            return {"batch_id": batch_id, "acknowledged": True}
        if self._buffer.fate(batch_id) == "expired":
            raise Conflict(
                f"the lease of batch {batch_id} has ended; its groups went back",
                type="lease_expired",
                detail={"batch_id": batch_id, "leases": [lease.batch_id for lease in self._buffer.leases]},
            )
        raise NotFound(f"no batch {batch_id}")

    def acknowledge_all(self, batch_ids: Iterable[str]) -> tuple[str, ...]:
        """Consume batches for good, without waiting for the disk; returns those whose lease has ended."""
        return tuple(batch_id for batch_id in batch_ids if not self._acknowledge(batch_id))

    def experts_of(self, sample_id: str) -> ReadHandle:
        """The routed experts of one sample that is lent.

        Raises:
            NotFound: no batch that is lent has such a sample; `no_experts`: it has none.
        """
        group_id = sample_id.rpartition(".")[0]
        for batch in self._leased.values():
            for sample in (s for group in batch.groups if group.group_id == group_id for s in group.samples):
                if sample.sample_id == sample_id and sample.experts is not None:
                    return ReadHandle(sample_id, sample.experts, batch.loan)
                if sample.sample_id == sample_id:
                    raise NotFound(f"sample {sample_id} has no routed experts", type="no_experts")
        raise NotFound(f"no batch that is lent has a sample {sample_id[:_ECHO_CHARS]!r}")

    def _acknowledge(self, batch_id: str) -> bool:
        batch = self._leased.pop(batch_id, None)
        if batch is not None:
            batch.loan.end(f"the ack of batch {batch_id}")  # before its tensors go: another thread may be reading
        lease = self._buffer.acknowledge(batch_id)
        if lease is None:
            return self._buffer.fate(batch_id) == "acknowledged"
        self._mixture.acknowledged(batch_id)
        self._storage.consumed(lease)
        self._tally.settled["consumed"] += len(lease.groups)
        self._bus.emit(BatchAcked(batch_id, lease.step, len(lease.groups)))
        self._set_timer()
        return True

    def _fresh(self, step: int) -> list[Group]:
        """Ready groups that may be handed over at `step`; the others are settled EXPIRED here."""
        fresh: list[Group] = []
        dropped = 0
        oldest = oldest_unmasked(step, self.max_token_staleness)
        for group in self._buffer.ready_groups():
            reason = refusal(group, step, self.max_staleness) or ("tokens_stale" if spent(group, oldest) else None)
            if reason is None:
                fresh.append(group)
                continue
            dropped += 1
            self._buffer.drop_ready(group)
            self._settling.settle(group, "expired", reason)
        if dropped:
            self._buffer.changed()
        return fresh

    def _lease(self, step: int, groups: list[Group], started: float, batch_id: str | None = None) -> Batch:
        loop = asyncio.get_running_loop()
        batch_id = batch_id or self._new_id()
        self._mixture.lent(batch_id, groups)
        wait_s = loop.time() - started
        oldest = oldest_unmasked(step, self.max_token_staleness)
        metrics = self._figures.of(groups, step, oldest, wait_s)
        metrics["max_token_staleness"] = self.max_token_staleness
        lease = self._buffer.lease(batch_id, step, groups, loop.time() + self._lease_s, metrics)
        self._next_step, self._known_step = step + 1, None
        self._storage.leased(lease)
        batch = self._leased[batch_id] = Batch(batch_id, step, lease.groups, metrics, oldest=oldest)
        samples = sum(len(group.samples) for group in groups)
        self._bus.emit(BatchTaken(batch_id, step, len(lease.groups), samples, wait_s, batch.metrics))
        self._set_timer()
        return batch

    def _set_timer(self) -> None:
        """One timer, for the lease that ends next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = min((lease.expires_at for lease in self._buffer.leases), default=None)
        if ends is not None:
            self._timer = asyncio.get_running_loop().call_at(ends, self._expire)

    def _expire(self) -> None:
        self._end(self._buffer.expire_leases(asyncio.get_running_loop().time()))

    def _end(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._forget(lease)
        self._set_timer()

    def _forget(self, lease: Lease) -> None:
        batch = self._leased.pop(lease.batch_id, None)
        if batch is not None:
            batch.loan.end(f"the lease of batch {lease.batch_id} ended")
        self._mixture.returned(lease.batch_id)
        self._storage.unleased(lease)
        self._bus.emit(LeaseExpired(lease.batch_id, lease.step, len(lease.groups)))

    def recall(self, step: int | None) -> None:
        """Follow the leases that the buffer has from an earlier life.

        The engines may have weights that were made after it: a trainer that went back to a checkpoint has its own still
        to load. Until a batch is lent the next step is not taken to be later than the one after those of that life.

        Args:
            step: the last whose batch was acknowledged; None: none was.
        """
        steps = [lease.step for lease in self._buffer.leases] + ([] if step is None else [step])
        self._known_step = max(steps) + 1 if steps else None
        for lease in self._buffer.leases:
            oldest = oldest_unmasked(lease.step, lease.metrics.get("max_token_staleness"))  # as it was lent
            batch = Batch(lease.batch_id, lease.step, lease.groups, lease.metrics, oldest=oldest)
            self._leased[lease.batch_id] = batch
        self._set_timer()

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
