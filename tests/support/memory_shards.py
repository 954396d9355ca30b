"""Shards made of numbers: they produce groups, and are slow, silent, or lost when they are told to be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollout_svc.errors import Conflict, NotFound, NotNow
from rollout_svc.heavy import Heavy
from rollout_svc.ledger import ACCOUNTS
from rollout_svc.packing.parts import Part as PackedPart
from rollout_svc.sharding.protocol import ShardLost

__all__ = ["MemoryShard", "figures"]


def figures(groups: int, step: int) -> dict[str, Any]:
    """The figures of so many groups, a sample each."""
    one = {
        "groups": groups,
        "samples": groups,
        "reward_mean": 1.0 if groups else None,
        "reward_std": 0.0 if groups else None,
        "reward_samples": groups,
        "response_length_mean": 2.0 if groups else None,
        "response_length_min": 2 if groups else None,
        "response_length_max": 2 if groups else None,
        "staleness": {"0": groups},
        "mixed_versions": 0,
        "masked_tokens": 0,
    }
    counts = {"aborted": 0, "continued": 0, "redone": 0, "failed": {}, "settled": {}, "wait_s": 0.0, "pause_s": 0.0}
    return {**one, **counts, "tasks": {"t": one}, "max_token_staleness": None}


class Part:
    """What a shard leased."""

    def __init__(self, groups: list[str], step: int) -> None:
        self.groups = groups
        self.metrics: Mapping[str, Any] = figures(len(groups), step) if groups else {}

    @property
    def count(self) -> int:
        return len(self.groups)

    async def records(self) -> Sequence[bytes]:
        return [orjson.dumps({"group_id": group}) for group in self.groups]

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        return {}

    async def part(self) -> PackedPart:
        return PackedPart([], b"", b"")


class MemoryShard:
    """One shard; a group is ready every `pace_s` while it is open, up to `room` that are not consumed.

    Attributes:
        silent: calls are taken and never answered, until this is False again; what they ask for is done then.
        overlap: it produced while it was told to be held, or with other weights than the fleet's.
    """

    def __init__(self, shard_id: str, *, pace_s: float = 0.1, room: int = 100, journal: bool = True) -> None:
        self.shard_id = shard_id
        self.life = 1
        self.pace_s = pace_s
        self.room = room
        self.journal = journal
        self.delay_s = 0.001
        self.silent = False
        self.lost = False
        self.refuses: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.open = False
        self.paused = False
        self.ticket = 0
        self.version = 0
        self.made = 0
        self.accounts: dict[str, str] = {}
        self.leases: dict[str, tuple[int, list[str]]] = {}
        self.fates: dict[str, str] = {}
        self.pushed: set[str] = set()
        self.made_under: dict[str, int] = {}
        self.told: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._spoken = asyncio.Event()
        self._producing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to produce, once open."""
        self._producing = asyncio.get_running_loop().create_task(self._produce())

    async def close(self) -> None:
        """End it."""
        if self._producing is not None:
            self._producing.cancel()
            await asyncio.wait({self._producing})

    async def _produce(self) -> None:
        while True:
            await asyncio.sleep(self.pace_s)
            unsettled = sum(account != "consumed" for account in self.accounts.values())
            if self.open and not self.lost and unsettled < self.room:
                self.made += 1
                group = f"{self.shard_id}:{self.made}"
                self.accounts[group] = "ready"
                self.made_under[group] = self.version
                self._stir()

    def _stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def die(self) -> None:
        """Be lost; what is under way is lost with it, and without a journal all of it."""
        self.lost, self.open, self.paused = True, False, False
        if not self.journal:
            self.accounts, self.leases, self.fates, self.pushed = {}, {}, {}, set()
        self._stir()
        self.speak()

    def rise(self) -> None:
        """Be there again, in another life: held, with the weights of the start."""
        self.lost, self.life, self.ticket, self.version = False, self.life + 1, 0, 0

    def hush(self) -> None:
        """Be silent."""
        self.silent = True

    def speak(self) -> None:
        """Be silent no more."""
        self.silent = False
        self._spoken.set()
        self._spoken = asyncio.Event()

    async def _way(self, name: str) -> None:
        """The way of a call to the shard."""
        self.calls.append(name)
        life = self.life
        await asyncio.sleep(self.delay_s)
        while self.silent:
            await self._spoken.wait()
        if self.lost or self.life != life:
            raise ShardLost(f"shard {self.shard_id} is gone")
        if name in self.refuses:
            raise self.refuses[name]

    @property
    def ready(self) -> list[str]:
        return [group for group, account in self.accounts.items() if account == "ready"]

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        await self._way("ready_groups")
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.ready) < wanted and not self.lost:
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self.lost:
            raise ShardLost(f"shard {self.shard_id} is gone")
        return len(self.ready)

    async def lease(self, step: int, at_most: int, batch_id: str) -> Part:
        await self._way("lease")
        if batch_id in self.fates:
            raise Conflict("ended", type="lease_expired")
        if batch_id not in self.leases:
            groups = self.ready[:at_most]
            self.leases[batch_id] = step, groups
            self.accounts |= dict.fromkeys(groups, "leased")
        leased = self.leases[batch_id][1]  # what ends on the way back was leased all the same
        await self._back()
        return Part(leased, step)

    async def _back(self) -> None:
        """The way of the answer: who is lost now has done it, and nobody knows."""
        await asyncio.sleep(self.delay_s)
        if self.lost:
            raise ShardLost(f"shard {self.shard_id} is gone")

    async def give_back(self, batch_id: str) -> None:
        await self._way("give_back")
        _, groups = self.leases.pop(batch_id, (0, []))
        self.accounts |= dict.fromkeys(groups, "ready")
        self.fates.setdefault(batch_id, "expired")
        self._stir()

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        await self._way(name)
        return await getattr(self, f"_{name}")(**given)

    async def _checkpoint(self, path: str, step: int) -> dict[str, Any]:
        return {"path": path, "step": step}

    async def _status(self) -> dict[str, Any]:
        return self.describe()

    async def _pause(self, deadline_s: float, mode: str = "abort", **_: Any) -> dict[str, Any]:
        if not self.paused:
            self.ticket += 1
        self.open, self.paused = False, True
        await asyncio.sleep(min(0.01, deadline_s))
        await self._back()
        tally = {"in_flight": 1, "answered": 0, "late": 0, "cancelled": 1, "abandoned": 0, "residual": 0}
        return {
            "ticket": self.ticket,
            "mode": mode,
            "rungs": [{"name": "gate", "at_s": 0.0, "pending": 1}],
            "workers": {"w0": tally},
            "parked": [],
            "abandoned": [],
            "ledger": self.ledger(),
        }

    async def _resume(self, ticket: int | None, weight_version: int | None) -> dict[str, Any]:
        if ticket != self.ticket:
            raise Conflict("old", type="stale_ticket")
        self.open, self.paused = True, False
        return self.describe()

    async def _ack(self, batch_id: str) -> dict[str, Any]:
        if batch_id in self.leases:
            self.accounts |= dict.fromkeys(self.leases.pop(batch_id)[1], "consumed")
            self.fates[batch_id] = "acknowledged"
        await self._back()
        if self.fates.get(batch_id) == "acknowledged":
            return {"batch_id": batch_id, "acknowledged": True}
        if batch_id in self.fates:
            raise Conflict("ended", type="lease_expired")
        raise NotFound("no such batch")

    async def _update_weights(self, version: int, source: Any, pause: Any, force: bool) -> dict[str, Any]:
        if not self.paused:
            raise Conflict("not drained", type="not_drained")
        if f"load:{version}" in self.refuses:
            workers = {"w0": {"ok": False, "error": "no such weights"}}
            raise NotNow("update_failed", "it did not load", detail={"version": self.version, "workers": workers})
        self.version = version
        await self._back()
        return {"version": version, "workers": {"w0": {"ok": True, "version": version}}}

    async def _put_prompts(self, task: str, prompts: list[Any]) -> dict[str, int]:
        fresh = {prompt["id"] for prompt in prompts} - self.pushed
        self.pushed |= fresh
        await self._back()
        return {"accepted": len(fresh)}

    async def _evaluate(self, task: str, prompts: list[Any], **_: Any) -> dict[str, Any]:
        return {"groups": [{"prompt": prompt, "shard": self.shard_id} for prompt in prompts]}

    async def _set_concurrency(self, trainer: dict[str, Any], limits: dict[str, int]) -> dict[str, Any]:
        self.told = {"trainer": trainer, "limits": limits}
        plan: dict[str, Any] = self.describe()["plan"]
        return plan

    async def _stuck(self, older_than_s: float | None) -> dict[str, Any]:
        counts = {"older_than_s": older_than_s or 1.0, "counts": {"engine": 1}, "omitted": 0, "groups_omitted": 0}
        return {**counts, "samples": [{"worker": "w0", "since_s": 1.0}], "groups": []}

    def ledger(self) -> dict[str, Any]:
        """Its accounts, a sample a group."""
        book = dict.fromkeys(map(str, ACCOUNTS), 0)
        for account in self.accounts.values():
            book[account] += 1
        book = {"admitted": sum(book.values())} | book
        return {"groups": book, "samples": dict(book), "late_discarded": 0, "redone": 0}

    def describe(self) -> dict[str, Any]:
        """Its status."""
        lane = {"open": self.open, "in_flight": int(self.open), "parked": 0}
        worker = {"id": "w0", "state": "ACTIVE", "reason": "", "in_flight": 1, "weight_version": self.version}
        plan = {"workers": 1, "required": 4, "allowed": 5, "ratio": 1.2, "max_groups": self.room, "warnings": []}
        weights = {"version": self.version, "state": "idle", "phase": None, "phases_s": {}, "buckets": 0, "bytes": 0}
        return {
            "state": "paused" if self.paused else "running",
            "ticket": self.ticket,
            "weight_version": self.version,
            "weights": {**weights, "total_bytes": None, "seconds": 0.0, "error": ""},
            "lanes": {"train": lane, "eval": lane},
            "workers": [worker],
            "buffer": {
                "ready": len(self.ready),
                "unfinished": 0,
                "bytes": 0,
                "leases": [
                    {"batch_id": batch_id, "step": step, "groups": len(groups)}
                    for batch_id, (step, groups) in self.leases.items()
                ],
            },
            "producer": {
                "waiting_for": "" if self.open else "gate",
                "exhausted": False,
                "no_worker_s": None,
                "schedule": None,
                "tasks": {},
                "filtered_in_a_row": {},
                "sources": {},
            },
            "tensors": {},
            "trajectories": None,
            "judges": {},
            "evaluations": {
                "under_way": 0,
                "in_flight": 0,
                "waiting": 0,
                "max_in_flight": 4,
                "ledger": MemoryShard("", room=0).ledger() if self.shard_id else {},
            },
            "sessions": {"open": 0},
            "ledger": self.ledger(),
            "plan": plan,
            "rss_bytes": 1,
            "memory": {"verdict": "steady", "growing": []},
        }
