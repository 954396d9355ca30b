"""What the parts of a service have, for the watch on memory: bytes by account, and the record of `GET /v1/memory`.

Invariant: the accounts are sums that the parts keep themselves; asking costs a pass over workers and kinds of handles.
"""

from __future__ import annotations

import asyncio
import glob
import os
from pathlib import Path
from typing import Any, Final

from rollout_svc.assembly import Parts
from rollout_svc.config import Config
from rollout_svc.events import EventBus
from rollout_svc.observe.memory import MemorySampler, MemoryWatch, Probe, describe_system
from rollout_svc.tensors.accounts import tensor_bytes

__all__ = ["accounts_of", "memory_record", "watch_memory"]

_TOKEN_BYTES: Final = 36
"""A token in a list: a pointer, and an integer object beyond 256."""
_MOST_HOLDERS: Final = 200
"""Handles that are listed with their holders."""


def watch_memory(parts: Parts, config: Config, bus: EventBus, *, probes: bool) -> MemorySampler:
    """Make the watch on a service's memory, and have its task run."""
    sampler = MemorySampler(
        MemoryWatch(window_steps=config.memory.window_steps, growth=config.memory.growth, store=config.experts.store),
        bus=bus,
        accounts=lambda: accounts_of(parts),
        launched=lambda: _launched(parts),
        probe=Probe(_files(config), tensors=config.memory.debug) if probes else None,
    )
    if probes:
        parts.tasks.spawn("memory", sampler.run())
    return sampler


def accounts_of(parts: Parts) -> dict[str, int]:
    """Bytes that the parts know of, by account."""
    found = tensor_bytes(parts.handles)
    found["replay_buffer"] = parts.buffer.bytes - parts.buffer.heavy_bytes  # those are handles already
    found["in_flight"] = sum(worker.tokens for worker in parts.pool.workers.values()) * _TOKEN_BYTES
    return found


async def memory_record(sampler: MemorySampler, parts: Parts, config: Config) -> dict[str, Any]:
    """The record of `GET /v1/memory`; looks again before it is made."""
    await sampler.look()
    watch, handles = sampler.watch, parts.handles
    listed = handles.listed()
    system = await asyncio.to_thread(describe_system)
    return {
        "verdict": watch.verdict,
        "growing": [growth.as_json() for growth in watch.growing],
        "step": sampler.step,
        "steps": watch.steps(watch.processes[0]) if watch.processes else 0,
        "window_steps": watch.window_steps,
        "processes": [
            {
                "name": process,
                "pid": os.getpid() if process == watch.processes[0] else _launched(parts).get(process),
                "accounts": {
                    name: {
                        "bytes": account.bytes,
                        "first_bytes": account.first_bytes,
                        "bytes_per_step": None if account.bytes_per_step is None else round(account.bytes_per_step),
                    }
                    for name, account in watch.accounts(process).items()
                },
            }
            for process in watch.processes
        ],
        "handles": {
            kind: {"handles": tally.handles, "bytes": tally.bytes} for kind, tally in sorted(handles.live.items())
        },
        "lost": dict(handles.lost),
        "holders": [one._asdict() for one in listed[:_MOST_HOLDERS]] if config.memory.debug else None,
        "holders_omitted": max(0, len(listed) - _MOST_HOLDERS),
        "system": system,
        "trouble": sampler.trouble or None,
    }


def _launched(parts: Parts) -> dict[str, int]:
    """The processes of engines that the service started."""
    return {
        f"engine {worker.worker_id}": worker.launched.pid
        for worker in parts.pool.workers.values()
        if worker.launched is not None and worker.launched.pid is not None
    }


def _files(config: Config) -> dict[str, tuple[str, ...]]:
    """Files of this service on the disk, by account, as patterns."""
    found: dict[str, tuple[str, ...]] = {}
    if config.buffer.path is not None:
        found["journal_disk"] = tuple(_pattern(config.buffer.path) + end for end in ("", "-wal", "-shm"))
    if config.trajectories.path is not None:
        found["trajectories_disk"] = tuple(_pattern(config.trajectories.path) + end for end in ("", ".[0-9]*"))
    return found


def _pattern(path: str) -> str:
    whole = Path(path)
    return str(whole.parent / glob.escape(whole.name))
