"""Weights for all shards, or none in name.

Invariants:

- One update at a time, carried by a task of its own, under a pause over all shards.
- It has a version when every shard in step has confirmed it. Where some did not, `weights.on_failure` decides, as it
  does inside of a shard: `stop` and `quarantine` name the odd ones, which are held; `rollback` brings the others back.
- A shard that was not in step is left out and named; it is given these weights before it opens, where they can be given
  again (`disk`), or stays held until it reports their version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from rollout_svc.config import Config
from rollout_svc.errors import BadRequest, Conflict, NotNow, RolloutError, ServiceError
from rollout_svc.gate import LANES
from rollout_svc.pause.request import Asked
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members, Outcomes
from rollout_svc.sharding.naming import joined, named
from rollout_svc.sharding.pausing import FannedPause
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.request import read_source, read_version, refuse_old, refuse_undrained

__all__ = ["FannedWeights"]

_STEPS: Final = 3  # of an update, each of which a shard gives `weights.update_timeout_s`: load, confirm, take back


class FannedWeights:
    """Which weights all shards have, and who brings them others.

    Attributes:
        version: that the fleet has.
        error: what was wrong with the last update; empty: nothing.
    """

    def __init__(
        self,
        members: Members,
        tasks: TaskOwner,
        pauses: FannedPause,
        config: Config,
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self.version = config.trainer.initial_version
        self.error = ""
        self._source: Mapping[str, Any] | None = None
        self._members = members
        self._tasks = tasks
        self._pauses = pauses
        self._on_failure = config.weights.on_failure
        self._bound_s = _STEPS * (config.weights.update_timeout_s or config.request_timeout_s)
        self._resume = resume
        self._updating: asyncio.Task[dict[str, Any]] | None = None
        self._known = False

    @property
    def updating(self) -> asyncio.Task[dict[str, Any]] | None:
        """The update under way."""
        return self._updating

    async def update(
        self, version: int, source: Mapping[str, Any], pause: Mapping[str, Any] | None, *, force: bool
    ) -> dict[str, Any]:
        """Bring every shard to `version`; see `WeightCalls.update`."""
        if self._updating is not None:
            raise Conflict("another weight update is under way", type="updating")
        read_source(source)
        refuse_old(read_version(version), self.version, force=force)
        work = self._update(version, dict(source), pause, force=force)
        updating = self._updating = self._tasks.spawn(f"weights:{version}", work, handled=True)
        updating.add_done_callback(self._ended)
        return await asyncio.shield(updating)

    def _ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._updating = None
        if not task.cancelled():
            task.exception()

    async def bring(self, member: Member) -> None:
        """Give a shard that is held the fleet's weights; it raises where it cannot be given them."""
        reported = (member.known or {}).get("weight_version")
        if reported is not None and not self._known:  # a coordinator that begins finds the fleet as it is
            self.version = max(self.version, reported)
        self._known = True
        if reported == self.version:
            return
        if self._source is None or self._source["kind"] != "disk":
            told = f"its weights are of version {reported}, the fleet's of {self.version}, and cannot be sent again"
            raise NotNow("update_failed", f"shard {member.shard_id} is held: {told}")
        await member.call("update_weights", self._asked(member, self.version, self._source, force=True), self._until)

    @property
    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self._bound_s

    def _asked(self, member: Member, version: int, source: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        """What one shard is asked: of workers that are named it knows its own, by its own names."""
        if source.get("workers") is not None:
            mine = [name.partition(".")[2] for name in source["workers"] if name.startswith(f"{member.shard_id}.")]
            source = {**source, "workers": mine}
        return {"version": version, "source": dict(source), "pause": None, "force": force}

    async def _update(
        self, version: int, source: Mapping[str, Any], pause: Mapping[str, Any] | None, *, force: bool
    ) -> dict[str, Any]:
        pauses = self._pauses
        was_running, asked = pauses.state == "running", pauses.asked + 1
        if was_running:
            if pause is None:
                raise Conflict("the stage is running: pause it first, or pass `pause`", type="not_paused")
            refuse_undrained(pause.get("lanes", LANES))
            await pauses.pause(Asked(**pause))
        refuse_undrained(pauses.drained)
        try:
            record = await self._hand_out(version, source, force=force)
        except (BadRequest, Conflict):  # nothing was changed anywhere
            await self._go_on(asked, was_running=was_running)
            raise
        await self._go_on(asked, was_running=was_running)
        return record

    async def _go_on(self, asked: int, *, was_running: bool) -> None:
        if was_running and self._pauses.asked == asked and self._pauses.climbing is None:
            await self._resume()

    async def _hand_out(self, version: int, source: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        targets = self._members.inside
        before, self.error = (self.version, self._source), ""
        outcomes = await self._members.fan(targets, lambda member: self._one(member, version, source, force=force))
        workers = self._workers(outcomes)
        failed = {shard: outcome for shard, outcome in outcomes.items() if isinstance(outcome, RolloutError)}
        reached = [member for member in targets if _version_in(outcomes[member.shard_id]) == version]
        odd = [member for member in targets if member not in reached]
        if not reached:
            refused = [error for error in failed.values() if isinstance(error, BadRequest | Conflict)]
            if refused and len(refused) == len(targets):
                raise refused[0]
            self._fail(f"version {version} reached no shard: {_told(failed) or 'none is in step'}", workers)
        if failed and self._on_failure == "rollback" and before[1] is not None and before[1]["kind"] == "disk":
            await self._take_back(reached, before[0], before[1])
        else:
            self.version, self._source = version, source
            for member in odd:
                member.fall(f"version {version} did not reach it: {outcomes[member.shard_id]}")
        if failed:
            message = f"version {version} did not reach all of {', '.join(failed)}; the fleet is at {self.version}: "
            self.error = message + _told(failed)
            if self._on_failure != "quarantine":
                self._fail(self.error, workers)
        return {"version": self.version, "workers": workers}

    async def _one(self, member: Member, version: int, source: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        member.check_life()
        asked = self._asked(member, version, source, force=force)
        record: dict[str, Any] = await member.call("update_weights", asked, self._until)
        member.check_life()
        return record

    async def _take_back(self, members: list[Member], version: int, source: Mapping[str, Any]) -> None:
        """Bring those that were reached back to the version before; who does not go is odd, and held."""
        outcomes = await self._members.fan(members, lambda member: self._one(member, version, source, force=True))
        for member in members:
            if _version_in(outcomes[member.shard_id]) != version:
                member.fall(f"it did not go back to version {version}: {outcomes[member.shard_id]}")

    def _fail(self, message: str, workers: dict[str, Any]) -> None:
        self.error = message
        raise NotNow("update_failed", message, detail={"version": self.version, "workers": workers})

    def _workers(self, outcomes: Outcomes[dict[str, Any]]) -> dict[str, Any]:
        """What became of every worker, those of shards that said nothing included."""
        results: dict[str, Any] = {}
        for member in self._members.all:
            outcome = outcomes.get(member.shard_id)
            record = outcome if isinstance(outcome, dict) else _detail(outcome)
            if record is not None:
                results |= named(member.shard_id, record["workers"])
                continue
            told = {"error": str(outcome)} if outcome is not None else {"skipped": member.why}
            names = [joined(member.shard_id, one["id"]) for one in (member.known or {}).get("workers", [])]
            results |= {name: {"ok": False, **told} for name in names or [member.shard_id]}
        return results


def _detail(outcome: dict[str, Any] | RolloutError | None) -> dict[str, Any] | None:
    """The record that comes with an update that failed."""
    detail = outcome.detail if isinstance(outcome, ServiceError) else None
    return detail if isinstance(detail, dict) and "version" in detail and "workers" in detail else None


def _version_in(outcome: dict[str, Any] | RolloutError) -> int | None:
    record = outcome if isinstance(outcome, dict) else _detail(outcome)
    return None if record is None else record["version"]


def _told(failed: Mapping[str, RolloutError]) -> str:
    return "; ".join(f"{shard}: {error}" for shard, error in failed.items())
