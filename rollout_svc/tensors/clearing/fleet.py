"""The processes of a clear: who they are, how they are reached, and one order or question sent to each at once.

Invariants (P29):

- No process waits for another, and none stops the others: each has a task of its own.
- An order ends by its `until`; what still runs at the deadline is cancelled and counts as not done, also where it
  swallows that.
- One clear at a time; whoever comes meanwhile waits in line.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog

from rollout_svc.tasks import TaskOwner
from rollout_svc.tensors.clearing.plan import Ending, Order, Plan, Verb
from rollout_svc.tensors.clearing.ports import Connect, Peer
from rollout_svc.tensors.clearing.roles import Consumer, Rank, Roles

__all__ = ["Fleet"]

_log = structlog.get_logger("tensors")


class Fleet:
    """Every process that could have cached a shard, and those that own some.

    Args:
        connect: makes the peer of an address.
        plan: who is owed what.
    """

    def __init__(self, connect: Connect, plan: Plan) -> None:
        self.plan = plan
        self.roles = Roles()
        self._connect = connect
        self._peers: dict[str, Peer] = {}
        self._tasks = TaskOwner()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()

    def register(self, role: str, consumers: Iterable[Consumer]) -> None:
        """Take consumers in under a role; see `Controller.register`."""
        them = list(consumers)
        ended = self.roles.take(role, them)
        for address in ended:
            self._end(address)
        for consumer in them:
            if consumer.peer is not None:
                self._peers[consumer.address] = consumer.peer
            self.heard(consumer.address, consumer.incarnation)
        self._wake.set()

    def unregister(self, role: str, rank: Rank | None) -> None:
        """End a role, or one rank of it."""
        for address in self.roles.leave(role, rank):
            self._end(address)
        self._wake.set()

    def heard(self, address: str, incarnation: str | None) -> None:
        """Take note of which process is at the address of a consumer."""
        forgotten = self.plan.join(address, incarnation)
        if forgotten:
            _log.info("shards.returned", process=address, incarnation=incarnation, forgotten_ids=forgotten)

    def _end(self, address: str) -> None:
        forgotten = self.plan.leave(address)
        self._peers.pop(address, None)
        _log.info("shards.left", process=address, forgotten_ids=forgotten)

    def peer(self, address: str) -> Peer:
        """Return how a process is reached."""
        if address not in self._peers:
            self._peers[address] = self._connect(address)
        return self._peers[address]

    async def clear(
        self, verb: Verb, ids: Sequence[str], drops: Mapping[str, tuple[str, ...]], limit_s: float
    ) -> tuple[int, Ending]:
        """Have everybody do what they are owed; returns how many were asked, and what is left.

        Args:
            verb: of every member: `drain` or `flush`.
            ids: of shards.
            drops: by owner, what it shall drop.
            limit_s: for all of it, from when its turn comes, in seconds.
        """
        async with self._lock:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + limit_s
            asked: set[str] = set()
            running: set[asyncio.Task[None]] = set()
            self.plan.begin(verb, ids, drops=drops, now=loop.time(), deadline=deadline)
            try:
                while (now := loop.time()) < deadline:
                    self._wake.clear()
                    for order in self.plan.due(now):
                        asked.add(order.process)
                        running.add(self._tasks.spawn(f"{verb}:{order.process}", self._send(order), handled=True))
                    running = {task for task in running if not task.done()}
                    at = self.plan.next_at()
                    if not running and at is None:
                        break
                    await self._woken(min(deadline, at or deadline))
            finally:
                for task in running:
                    task.cancel()
                ending = self.plan.end()
            return len(asked), ending

    async def _woken(self, at: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(at):
                await self._wake.wait()

    async def _send(self, order: Order) -> None:
        loop = asyncio.get_running_loop()
        try:
            peer = self.peer(order.process)
            calls = {"drain": peer.drain, "drop": peer.drop}
            async with asyncio.timeout_at(order.until):
                incarnation = await (peer.flush() if order.verb == "flush" else calls[order.verb](order.ids))
        except TimeoutError:
            self.plan.failed(order, "no answer in time", loop.time())
        except Exception as error:  # noqa: BLE001 - of a port that anybody may have written; it must not stop the others
            self.plan.failed(order, f"{type(error).__name__}: {error}", loop.time())
        else:
            forgotten = self.plan.done(order, incarnation)
            if forgotten:
                _log.info("shards.returned", process=order.process, incarnation=incarnation, forgotten_ids=forgotten)
        finally:
            self._wake.set()

    async def ask(
        self, addresses: Iterable[str], question: Callable[[str, Peer], Awaitable[Any]], limit_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask processes something, all at once.

        Returns:
            By address, the answers; and by address, why there is none. Raises nothing of theirs.
        """
        answers: dict[str, Any] = {}
        failures: dict[str, str] = {}
        deadline = asyncio.get_running_loop().time() + limit_s

        async def one(address: str) -> None:
            try:
                async with asyncio.timeout_at(deadline):
                    answers[address] = await question(address, self.peer(address))
            except TimeoutError:
                failures[address] = "no answer in time"
            except Exception as error:  # noqa: BLE001 - as in `_send`
                failures[address] = f"{type(error).__name__}: {error}"

        tasks = {
            address: self._tasks.spawn(f"ask:{address}", one(address), handled=True)
            for address in dict.fromkeys(addresses)
        }
        if tasks:
            try:
                await asyncio.wait(tasks.values(), timeout=limit_s + 0.1)
            finally:
                for task in tasks.values():
                    task.cancel()
        for address in tasks.keys() - answers.keys() - failures.keys():
            failures[address] = "no answer in time"
        return answers, failures

    async def close(self, limit_s: float) -> tuple[str, ...]:
        """End what still runs; returns the names of tasks that do not end."""
        return await self._tasks.close(asyncio.get_running_loop().time() + limit_s)
