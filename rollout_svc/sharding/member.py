"""One shard, as its coordinator knows it.

Invariants:

- A member is in step (`inside`) only in the life, and with the weights, that the coordinator has acknowledged; whoever
  did not answer, died, or has other weights is out of step, with a reason, and held until it was brought back in.
- No answer is waited for beyond its deadline; who does not give it is out of step.
- A pause is not sent while the shard is being told to open: it would come before what it is to undo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from rollout_svc.errors import ConfigError, NotNow
from rollout_svc.sharding.accounts import EMPTY, ledger_sum, settled_in
from rollout_svc.sharding.book import Debt
from rollout_svc.sharding.protocol import Shard, ShardLost
from rollout_svc.sharding.reports import Silence
from rollout_svc.tasks import TaskOwner, wait_until

__all__ = ["Member"]

T = TypeVar("T")


class Member:
    """See the module's invariants.

    Attributes:
        why: it is out of step; empty: it is not.
        life: of the shard, when it was last brought in.
        ticket: of the shard's own last pause.
        known: its last status.
        owed: batches that it has still to be told of, and what.
        wake: there is something to bring it in step for.
        refused: it cannot be, with these settings and this journal: what it said of them.
    """

    def __init__(self, shard: Shard, tasks: TaskOwner, *, journal: bool, changed: Callable[[], None]) -> None:
        self.shard = shard
        self.shard_id = shard.shard_id
        self.why = "it has not answered yet"
        self.life: int | None = None
        self.ticket = 0
        self.known: dict[str, Any] | None = None
        self.heard_at = asyncio.get_running_loop().time()
        self.owed: dict[str, Debt] = {}
        self.wake = asyncio.Event()
        self.refused: ConfigError | None = None
        self._again_at: float | None = None
        self._tasks = tasks
        self._journal = journal
        self._changed = changed
        self._opening: asyncio.Task[Any] | None = None
        self._ledger: Mapping[str, Any] = EMPTY
        self._ledger_life: int | None = None
        self._settled: Mapping[str, Any] = EMPTY  # in lives that left no journal

    def __repr__(self) -> str:
        return f"<Member {self.shard_id} life={self.life} {self.why or 'in step'}>"

    @property
    def inside(self) -> bool:
        """Whether it follows the coordinator."""
        return not self.why

    @property
    def opening(self) -> bool:
        """Whether it is being told to go on."""
        return self._opening is not None and not self._opening.done()

    @property
    def ledger(self) -> dict[str, Any]:
        """Its accounts, over all its lives."""
        return ledger_sum((self._settled, self._ledger))

    def silence(self, now: float) -> Silence:
        """What can be said of it where it does not answer."""
        workers = self.known["workers"] if self.known is not None else []
        return Silence(max(0.0, now - self.heard_at), {one["id"]: one["in_flight"] for one in workers})

    def as_json(self) -> dict[str, Any]:
        """What status says of it."""
        left_s = None
        if self._again_at is not None:
            left_s = round(max(0.0, self._again_at - asyncio.get_running_loop().time()), 1)
        state = "held" if self.why else "in_step"
        return {"id": self.shard_id, "state": state, "reason": self.why, "life": self.life, "again_in_s": left_s}

    def fall(self, why: str, again_in_s: float | None = None) -> None:
        """It is out of step from now on, until somebody brings it back; it says when it tries again, if it does."""
        fell, self.why = not self.why, why
        self._again_at = None if again_in_s is None else asyncio.get_running_loop().time() + again_in_s
        self.wake.set()
        if fell:
            self._changed()

    def refuse(self, error: ConfigError) -> None:
        """It is out of step, and waiting for it is no use; it may still come where it says when it tries again."""
        self.refused = error
        self.fall(str(error), error.again_in_s)
        self._changed()  # who waits for it waits in vain

    def enter(self, life: int) -> None:
        """It is in step, in this life."""
        self.life, self.why, self.refused, self._again_at = life, "", None, None
        self._changed()

    def hear(self, status: dict[str, Any]) -> None:
        """It said how it stands."""
        self.known = status
        self.count(status["ledger"])

    def count(self, ledger: Mapping[str, Any]) -> None:
        """It said what is in its books."""
        life = self.shard.life
        if self._ledger_life is not None and life != self._ledger_life and not self._journal:
            self._settled = ledger_sum((self._settled, settled_in(self._ledger)))
        self._ledger, self._ledger_life = ledger, life

    async def ask(self, what: str, coroutine: Coroutine[Any, Any, T], until: float) -> T:
        """Wait for an answer until then, and no longer.

        Raises:
            ShardLost: it died, or there was none in time. Whoever is meant to follow is out of step then.
            NotNow: the service ended meanwhile, and the question with it; who asked was not cancelled.
        """
        task = self._tasks.spawn(f"{self.shard_id}:{what}", coroutine, handled=True)
        try:
            await wait_until((task,), until)
            if task.cancelled():
                raise NotNow("stopping", "the service is stopping")
            answer: T = task.result() if task.done() else _silent(self.shard_id, what)
        except ShardLost as lost:
            self.fall(str(lost))
            raise
        finally:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.heard_at = asyncio.get_running_loop().time()
        return answer

    async def call(self, name: str, given: Mapping[str, Any], until: float) -> Any:
        """Make a call of the service's, as `ask` does."""
        return await self.ask(name, self.shard.call(name, given), until)

    def check_life(self) -> None:
        """Raise ShardLost where it is in another life than the one it was brought in for."""
        if self.shard.life != self.life:
            self.fall(f"shard {self.shard_id} was lost, and has returned")
            raise ShardLost(self.why)

    async def pause(self, given: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Hold it; returns the record of its report."""
        if self._opening is not None:
            await wait_until((self._opening,), until)
        report: dict[str, Any] = await self.call("pause", given, until)
        self.ticket = report["ticket"]
        self.count(report["ledger"])
        return report

    async def open(self, until: float, weight_version: int | None = None) -> None:
        """Have it go on after its last pause; in another life than that one it stays held."""
        given = {"ticket": self.ticket, "weight_version": weight_version}
        opening = self._tasks.spawn(f"{self.shard_id}:open", self.call("resume", given, until), handled=True)
        self._opening = opening
        try:
            self.hear(await asyncio.shield(opening))
        finally:
            if self._opening is opening and opening.done():
                self._opening = None


def _silent(shard_id: str, what: str) -> Any:
    raise ShardLost(f"shard {shard_id} did not answer {what} in time")
