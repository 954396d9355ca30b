"""The end of a step, for a trainer with any number of processes.

**At step end every process that could have cached a shard drains it.** `clear_batches(tree)`

1. pops the fetch buffer of the controller itself,
2. tells each storage owner to drop its ids, which also pops the owner's own fetch buffer,
3. sends the flat list of ids to every consumer of every registered role, on all ranks.

Invariants (P29):

- Ids travel, never tensors. All processes are asked at once, under one deadline; one that is dead or hangs costs the
  others nothing.
- On a rank that is given nothing (`clear_batches()`, `clear_batches(None)`) it does nothing.
- What failed is tried again within the call, then kept and tried with the next call, then reported: `DrainFailed`,
  raised after everything else is done. Nothing is kept longer, and nothing is tried again after it was reported.
- Where the step itself failed, its error is the one that is raised; a `DrainFailed` is noted on it.
- Statistics fail no step.
- The leases of live batches are renewed until they are cleared.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

import structlog

from rollout_svc.errors import DrainFailed
from rollout_svc.tasks import TaskOwner
from rollout_svc.tensors.clearing.fleet import Fleet
from rollout_svc.tensors.clearing.http import HttpPeers
from rollout_svc.tensors.clearing.local import LocalPeer
from rollout_svc.tensors.clearing.plan import EVERYTHING, Plan, Verb
from rollout_svc.tensors.clearing.ports import Connect, Peer
from rollout_svc.tensors.clearing.ray import RayPeer
from rollout_svc.tensors.clearing.records import Cleared, Statistics, log_cleared
from rollout_svc.tensors.clearing.roles import Consumer, Rank
from rollout_svc.tensors.clearing.trees import flatten_shards
from rollout_svc.tensors.clearing.watch import Figures, Watch, read_figures
from rollout_svc.tensors.shards.names import check_address
from rollout_svc.tensors.shards.owner import LEASE_S
from rollout_svc.tensors.shards.plane import Plane
from rollout_svc.tensors.shards.process import fetch_buffer

__all__ = ["Controller", "Step"]

_log = structlog.get_logger("tensors")
P = ParamSpec("P")
T = TypeVar("T")
RAY: Final = "ray:"
HERE: Final = "controller"
"""Role of this process, and its address this process where it owns nothing and so needs none."""
STATISTICS_PART: Final = 0.2
"""Of the deadline: what is kept for the statistics."""


class Controller:
    """Clears batches from every process that could have a part of one. Used in one event loop.

    Args:
        plane: owner and fetch buffer of this process, a node's `plane` where it has a node; None: its fetch buffer.
        token: bearer token of all data planes, where they want one.
        connect: makes the peer of an address; None: over HTTP, and in Ray what begins with `ray:`.
        deadline_s: of a whole clear, statistics included.
        attempts: within one call, for each process.
        renew_s: how often the leases of live batches are renewed; a quarter of an owner's lease, or less.
    """

    def __init__(
        self,
        plane: Plane | None = None,
        *,
        token: str | None = None,
        connect: Connect | None = None,
        deadline_s: float = 30.0,
        attempts: int = 3,
        renew_s: float = LEASE_S / 4,
    ) -> None:
        self.deadline_s = deadline_s
        self.renew_s = renew_s
        self._http = HttpPeers(token)
        self._checks = connect is None
        self._fleet = Fleet(connect or self._reach, Plan(attempts=attempts))
        here = plane or Plane(buffer=fetch_buffer())
        if here.owner is not None or here.buffer is not None:
            address = here.owner.address if here.owner is not None else HERE
            self._fleet.register(HERE, [Consumer(address, (0,), here.incarnation, LocalPeer(here))])
        self._watch = Watch()
        self._live: dict[str, str] = {}
        self._owners: dict[str, None] = {}
        self._tasks = TaskOwner()

    def __repr__(self) -> str:
        members = len(self._fleet.plan.members)
        return f"<Controller {members} processes, {len(self._live)} live ids, {self._fleet.plan.kept} kept>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def register(self, role: str, consumers: Iterable[Consumer | str]) -> None:
        """Take in the processes of a role, before they fetch anything; any name of a role will do.

        A rank that is taken again belongs to the new process; what its predecessor was owed is dropped. A process that
        comes while a clear is going on is part of it.

        Args:
            role: actor, critic, reference, teacher, evaluator, …
            consumers: each on its rank, or addresses, which get ranks in their order.

        Raises:
            TypeError: one address, in place of several.
            ValueError: two processes on one rank: only one of them would be drained; or what is no address, where
                neither its peer nor a `connect` knows what to make of it. Nobody was registered.
        """
        if isinstance(consumers, str):
            raise TypeError(f"expected a list of consumers, not one address: [{consumers!r}]")
        taken = [Consumer(one) if isinstance(one, str) else one for one in consumers]
        for one in taken:
            if self._checks and one.peer is None:
                check_address(one.address)
        self._fleet.register(role, taken)

    def unregister(self, role: str, rank: Rank | None = None) -> None:
        """Let a role go, or one rank of it: a process that has no rank left is not drained any more. Idempotent."""
        self._fleet.unregister(role, rank)

    def live(self, *trees: Any) -> int:
        """Name a batch that is under way, until it is cleared: its leases are renewed, and it is no leak.

        Returns:
            How many shards are live now.
        """
        for shard in flatten_shards(trees):
            self._live[shard.id] = shard.owner
        if self._live and not self._tasks.live:
            self._tasks.spawn("shards:renew", self._renew(), handled=True)
        return len(self._live)

    async def clear_batches(self, *trees: Any) -> Cleared:
        """End a step: have every process let go of the batch; see the module.

        Args:
            trees: the batch, with its RTensors anywhere in it. Nothing, or only None: not the rank that clears.

        Raises:
            DrainFailed: what had failed with the call before failed again; names who, and how many ids. All other
                drains are done, and `cleared` says of them.
        """
        trees = tuple(tree for tree in trees if tree is not None)
        if not trees:
            return Cleared()
        owners = {shard.id: shard.owner for shard in flatten_shards(trees)}
        drops: dict[str, list[str]] = {}
        for shard_id, owner in owners.items():
            drops.setdefault(owner, []).append(shard_id)
        self._owners |= dict.fromkeys(drops)
        self._live |= owners  # until they are gone: a clear beside this one shall not take them for a leak
        return await self._clear("drain", tuple(owners), {owner: tuple(its) for owner, its in drops.items()})

    async def drain(self, ids: Iterable[str]) -> Cleared:
        """Have every process let go of what it fetched of these shards; their owners keep them.

        Raises:
            DrainFailed: as `clear_batches`.
        """
        return await self._clear("drain", tuple(dict.fromkeys(ids)), None)

    async def flush_all(self) -> Cleared:
        """Have every process let go of all it fetched; owners keep what they own.

        Raises:
            DrainFailed: as `clear_batches`.
        """
        return await self._clear("flush", EVERYTHING, None)

    def step(self, *trees: Any) -> Step:
        """Clear in `finally`: `async with controller.step(batch) as step: …`; see `Step`."""
        return Step(self, trees)

    def clears(self, train: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Decorate a step: what is remote in its arguments, and in what it returns, is cleared when it ends."""

        @functools.wraps(train)
        async def stepped(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self.step(args, kwargs) as step:
                result = await train(*args, **kwargs)
                step.add(result)
                return result

        return stepped

    async def statistics(self, limit_s: float | None = None) -> Statistics:
        """Ask every process what it holds; what does not answer in time is named, and fails nothing."""
        limit_s = self.deadline_s * STATISTICS_PART if limit_s is None else limit_s
        members = self._fleet.plan.members
        answers, failures = await self._fleet.ask((*members, *self._owners), lambda _, peer: peer.stats(), limit_s)
        figures: list[Figures] = []
        for address, answer in answers.items():
            try:
                one = read_figures(address, self._fleet.roles.parts(address), answer)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                failures[address] = f"not what a data plane answers: {error!r}"
                continue
            figures.append(one)
            if address in self._fleet.plan.members:
                self._fleet.heard(address, one.incarnation)
        for address, why in failures.items():
            parts = self._fleet.roles.parts(address)
            _log.warning("shards.statistics_failed", process=address, roles=parts, why=why)
            if address not in self._live.values():
                self._owners.pop(address, None)  # it may be gone for good; the next batch of it names it again
        return Statistics(tuple(figures), tuple(failures))

    async def close(self) -> None:
        """End the renewals and close the connections; idempotent. What is kept is not tried again."""
        loop = asyncio.get_running_loop()
        await self._tasks.close(loop.time() + 1.0)
        await self._fleet.close(1.0)
        await self._http.close()

    def _reach(self, address: str) -> Peer:
        return RayPeer(address) if address.startswith(RAY) else self._http(address)

    async def _clear(self, verb: Verb, ids: tuple[str, ...], drops: dict[str, tuple[str, ...]] | None) -> Cleared:
        """Carry a clear out; without `drops` owners keep what they own, and nothing is said of it."""
        began = asyncio.get_running_loop().time()
        try:
            asked, ending = await self._fleet.clear(verb, ids, drops or {}, self.deadline_s * (1 - STATISTICS_PART))
        finally:
            if drops is not None:
                for shard_id in ids:
                    self._live.pop(shard_id, None)
        live = set(self._live)  # when the processes were asked, or now: what was live at either time may be there
        statistics = await self.statistics()
        live |= self._live.keys()
        elapsed = asyncio.get_running_loop().time() - began
        cleared = Cleared(len(ids), asked, ending.kept, ending.given_up, statistics, elapsed_s=elapsed)
        cleared = self._judged(cleared, None if drops is None else ids, live)
        log_cleared(cleared, self._fleet.roles)
        if ending.given_up:
            raise DrainFailed([str(failure) for failure in ending.given_up], cleared)
        return cleared

    def _judged(self, cleared: Cleared, dropped: Collection[str] | None, live: Collection[str]) -> Cleared:
        """Look at what is left, and add what of it should not be."""
        owed: dict[str, set[str]] = {}
        for failure in (*cleared.kept, *cleared.given_up):
            owed.setdefault(failure.process, set()).update(failure.ids)
        figures = cleared.statistics.figures
        leaks = self._watch.look(figures, live=live, dropped=None if dropped is None else frozenset(dropped), owed=owed)
        return cleared._replace(leaks=leaks, expired=tuple(self._watch.expired(figures).items()))

    async def _renew(self) -> None:
        """Renew the leases of live batches, as long as there are any."""
        while self._live:
            await asyncio.sleep(self.renew_s)
            by_owner: dict[str, list[str]] = {}
            for shard_id, owner in self._live.items():
                by_owner.setdefault(owner, []).append(shard_id)

            def renew(address: str, peer: Peer, ids: Mapping[str, list[str]] = by_owner) -> Awaitable[Any]:
                return peer.renew(ids[address])

            _, failures = await self._fleet.ask(by_owner, renew, self.renew_s)
            for owner, why in failures.items():
                _log.warning("shards.renewal_failed", process=owner, ids=len(by_owner[owner]), why=why)


class Step(AbstractAsyncContextManager["Step"]):
    """One step: what is added to it is live until it ends, and is cleared then, however it ends.

    Attributes:
        cleared: what became of the clear, once the step has ended.
    """

    def __init__(self, controller: Controller, trees: tuple[Any, ...]) -> None:
        self.cleared: Cleared | None = None
        self._controller = controller
        self._trees = [tree for tree in trees if tree is not None]

    def add(self, *trees: Any) -> None:
        """Take in RTensors that this step made or got; those that are added twice are cleared once."""
        self._trees += [tree for tree in trees if tree is not None]
        self._controller.live(*trees)

    async def __aenter__(self) -> Self:
        self._controller.live(*self._trees)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.cleared = await self._controller.clear_batches(*self._trees)
        except DrainFailed as failed:
            self.cleared = failed.cleared
            if error is None:
                raise
            error.add_note(str(failed))
