"""Going on from what an earlier life left: the storage is opened, and what it found becomes groups, leases, positions.

Invariants:

- It is done before anybody can ask for anything, so that no call meets half of it.
- Nothing of it is noted again: it is in the storage already.
- Groups and samples keep their ids; an unfinished group goes on like one that a pause took back.
- Routed experts are put where this life keeps them, and owned before anybody can ask. What there is no room for there
  is kept in memory, where it is already.
- A lease keeps its end in wall-clock time, whatever the loop's clock says in this life.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rollout_svc.assembly import Parts, Prepared
from rollout_svc.buffer.journal import Journal
from rollout_svc.buffer.journal.fingerprint import fingerprint_of
from rollout_svc.buffer.journal.layout import refuse_other_layout
from rollout_svc.buffer.recovered import FoundGroup, Recovered
from rollout_svc.buffer.restoring import restore_journal
from rollout_svc.buffer.storage import MemoryStorage, Storage
from rollout_svc.config import WHOLE, Config, Portion
from rollout_svc.errors import ConfigError
from rollout_svc.group import Group
from rollout_svc.heavy import Heavy
from rollout_svc.outside import Outside
from rollout_svc.producer.sources import PushSource
from rollout_svc.rollout.partials import Partials
from rollout_svc.tasks import OnDeath
from rollout_svc.tensors import MemoryStore, Store, Stored, make_store, put_somewhere
from rollout_svc.workers.experts import KIND, OVERFLOW

__all__ = ["Restore", "keep_partials", "open_storage", "open_store", "recall"]

_SLICE: Final = 64  # groups made between two turns of the loop: some milliseconds
_DIGITS: Final = 32  # of a digest: 128 bits


class Restore(NamedTuple):
    """A snapshot to go on from, and the trainer steps done; None: the snapshot's."""

    snapshot: Path
    step: int | None = None


async def open_store(config: Config, outside: Outside, storage: Storage) -> Store:
    """Make what keeps heavy tensors: a caller's own, or what `experts.store` names.

    Args:
        config: the settings.
        outside: of the service.
        storage: open already; closed where this fails.

    Raises:
        ConfigError: at `experts.store`: it is not to be had here.
    """
    if outside.tensors is not None:
        return outside.tensors()
    name = config.experts.store if config.experts.enabled else "memory"
    if name == "memory":
        return MemoryStore()
    try:
        return await asyncio.to_thread(make_store, name, config.ray_address)
    except Exception as error:  # Ray is not installed, or of another version than the cluster's, or something else
        await storage.close()
        raise ConfigError.at("experts.store", f"{name}: {type(error).__name__}: {error}") from error


async def open_storage(
    config: Config, outside: Outside, restore: Restore | None = None, portion: Portion = WHOLE
) -> Storage:
    """Open what makes groups durable: a caller's own, the journal at `buffer.path`, or memory.

    With `restore` a snapshot becomes that journal first.

    Raises:
        ConfigError: at `buffer.path`: it cannot be used, or shards have journals there; they are as they were.
    """
    if outside.storage is not None:
        return outside.storage()
    path = None if config.buffer.path is None else Path(config.buffer.path)
    if path is None and restore is None:
        return MemoryStorage()
    return await asyncio.to_thread(_open, config, path, restore, outside.wall, portion)


def _open(
    config: Config, path: Path | None, restore: Restore | None, wall: Callable[[], float], portion: Portion
) -> Storage:
    contents = {task.name: _digest(Path(task.prompts.jsonl)) for task in config.tasks if task.prompts.jsonl is not None}
    fingerprint = fingerprint_of(config, contents, portion)
    if path is not None and portion == WHOLE:
        refuse_other_layout(path, shards=1)
    if restore is not None:
        restore_journal(restore.snapshot, path, fingerprint, restore.step)
    return (
        MemoryStorage()
        if path is None
        else Journal.open(
            path,
            fingerprint,
            keep_steps=config.journal.keep_steps,
            synchronous=config.journal.synchronous,
            wall=wall,
        )
    )


def _digest(path: Path) -> str:
    """Which lines a file has, short enough for a line to people."""
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:_DIGITS]}"


async def recall(
    parts: Parts, prepared: Prepared, on_death: OnDeath, wall: Callable[[], float], store: Store | None = None
) -> dict[str, int]:
    """Go on from what the storage found.

    Args:
        parts: fresh, and known to nobody yet.
        prepared: whose sources are not open yet.
        on_death: told once when the journal cannot be written any more.
        wall: wall-clock time, seconds since the epoch.
        store: where routed experts go; None: in memory.

    Returns:
        What there was, counted, for people; empty where there was nothing.
    """
    found = parts.storage.recover()
    if isinstance(parts.storage, Journal):
        parts.storage.ledger = parts.ledger
        parts.storage.on_failure = lambda error: on_death("journal", error, True)
    if not found:
        return {}
    parts.ledger.recall(found.settled_groups, found.settled_samples, found.late_discarded, found.redone)
    _place_sources(found, prepared)
    _place_prompts(found, parts)
    leased: dict[str, Group] = {}
    for number, one in enumerate(found.groups, 1):
        group = _group(one, parts, await _experts(one, parts, store or MemoryStore()))
        if one.account == "aborted":
            parts.buffer.put_back(group)
        else:
            parts.buffer.put_ready(group)
        if one.account == "leased":
            leased[group.group_id] = group
        if number % _SLICE == 0:
            await asyncio.sleep(0)
    now, wall_now, longest = asyncio.get_running_loop().time(), wall(), prepared.config.buffer.lease_s
    for lease in found.leases:
        rest = min(max(0.0, lease.expires_at - wall_now), longest)  # a clock that was set back makes none endless
        groups = [leased[group_id] for group_id in lease.group_ids]
        parts.buffer.lease(lease.batch_id, lease.step, groups, now + rest, lease.metrics)
    for batch_id, fate in found.ended:
        parts.buffer.remember(batch_id, fate)
    parts.batches.recall(found.step)
    if found.version is not None and found.weights_path is not None:
        await _recall_weights(found.version, found.weights_path, parts, prepared)
    return _counted(found)


async def _recall_weights(version: int, path: str, parts: Parts, prepared: Prepared) -> None:
    """Have engines brought to the weights of the life before, unless they can be seen to be gone."""
    if not prepared.config.weights.check_files or await asyncio.to_thread(os.path.exists, path):
        parts.fleet.recall(version, path)


def keep_partials(parts: Parts, interval_s: float) -> None:
    """Have samples under way written down every `interval_s`, where there is a journal."""
    if isinstance(parts.storage, Journal):
        partials = Partials(rollouts=parts.rollouts, pool=parts.pool, storage=parts.storage, interval_s=interval_s)
        parts.tasks.spawn("partials", partials.run(), critical=True)


def _place_sources(found: Recovered, prepared: Prepared) -> None:
    for task, position in found.positions.items():
        prepared.sources[task].restore(position)
    for task, pushed in found.pushed.items():
        source = prepared.sources[task]
        if isinstance(source, PushSource):
            source.restore_lines(pushed.lines, pushed.known)


def _place_prompts(found: Recovered, parts: Parts) -> None:
    """Prompts that wait to be admitted once more: in the tail, or before their sources where there is none any more."""
    tail = parts.producer.tail
    tail.restore(found.again if tail.size is not None else ())
    parts.producer.return_first(found.returned + (found.again if tail.size is None else ()))


async def _experts(found: FoundGroup, parts: Parts, store: Store) -> dict[int, Heavy]:
    """Own the routed experts of a group's samples, by member."""
    arrays = {index: state.experts for index, state in enumerate(found.samples) if state.experts is not None}
    if not arrays:
        return {}

    def put() -> dict[int, tuple[Stored, bool]]:
        return {index: put_somewhere(store, array) for index, array in arrays.items()}

    stored = put() if isinstance(store, MemoryStore) else await asyncio.to_thread(put)
    hold, name = parts.handles.hold, found.group_id
    return {
        index: hold(one, kind=KIND if there else OVERFLOW, holder=f"{name}.{index}")
        for index, (one, there) in stored.items()
    }


def _group(found: FoundGroup, parts: Parts, experts: Mapping[int, Heavy]) -> Group:
    now = asyncio.get_running_loop().time()
    group = Group(
        group_id=found.group_id,
        prompt=found.prompt,
        size=len(found.samples),
        lane="train",
        ledger=parts.ledger,
        now=now,
    )
    group.recall(
        found.samples, found.hand_backs, found.cuts, ready=found.account != "aborted", now=now, experts=experts
    )
    return group


def _counted(found: Recovered) -> dict[str, int]:
    accounts = [group.account for group in found.groups]
    states = [state for group in found.groups for state in group.samples]
    return {
        "ready": accounts.count("ready"),
        "leased": accounts.count("leased"),
        "unfinished": accounts.count("aborted"),
        "completed_samples": sum(state.packed is not None for state in states),
        "partial_samples": sum(bool(state.segments) for state in states),
        "pushed_prompts": sum(len(pushed.lines) for pushed in found.pushed.values()),
        "returned_prompts": len(found.returned) + len(found.again),
        "leases": len(found.leases),
        **({} if found.step is None else {"step": found.step}),
        **({} if found.version is None else {"weight_version": found.version}),
    }
