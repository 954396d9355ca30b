"""What the service says of itself: the record of `GET /v1/status`, and why a batch is not there yet.

Invariant: reading changes nothing, and costs a pass over workers and running groups, never over samples stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from rollout_svc.assembly import Parts
from rollout_svc.batch import Shortage
from rollout_svc.gate import LANES
from rollout_svc.plan import Plan
from rollout_svc.producer.schedule import WORDS
from rollout_svc.stuck import oldest_samples
from rollout_svc.tensors import Handles
from rollout_svc.weights.phases import Phases

__all__ = ["OLDEST", "describe", "hopeless", "rss_bytes", "shortage_of", "whereabouts"]

OLDEST: Final = 5
"""Samples named when something takes long."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Resident memory of this process, bytes; 0 where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def describe(parts: Parts, state: str, plan: Plan) -> dict[str, Any]:
    """The record of `status`."""
    return {
        "state": state,
        "ticket": parts.pauses.ticket,
        "weight_version": parts.fleet.version,
        "weights": {
            "version": parts.fleet.version,
            **(parts.updater.phases or Phases(float)).as_json(),
        },
        "lanes": {
            lane: {
                "open": parts.gate.is_open(lane),
                "in_flight": parts.pool.in_flight[lane],
                "parked": len(parts.rollouts.parked((lane,))),
            }
            for lane in LANES
        },
        "workers": [worker.as_json() for worker in parts.pool.workers.values()],
        "buffer": {
            "ready": parts.buffer.ready,
            "unfinished": parts.buffer.unfinished,
            "bytes": parts.buffer.bytes,
            "leases": [
                {"batch_id": lease.batch_id, "step": lease.step, "groups": len(lease.groups)}
                for lease in parts.buffer.leases
            ],
        },
        "producer": {
            "waiting_for": parts.producer.waiting,
            "exhausted": parts.producer.exhausted,
            "no_worker_s": parts.attendance.absent_s,
            "schedule": parts.producer.describe(),
            "tasks": parts.producer.mixture.as_json(),
            "filtered_in_a_row": parts.droughts.as_json(),
            "sources": {name: source.as_json() for name, source in parts.producer.sources.items()},
        },
        "tensors": _tensors(parts.handles),
        "trajectories": parts.trajectories.as_json(),
        "judges": parts.judging.as_json(),
        "evaluations": parts.evaluations.as_json(),
        "sessions": parts.sessions.as_json(),
        "ledger": parts.ledger.as_json(),
        "plan": plan.as_json(),
        "rss_bytes": rss_bytes(),
    }


def _tensors(handles: Handles) -> dict[str, Any]:
    """What is alive of heavy tensors, by kind, and how many of it its owners have forgotten."""
    live = handles.live
    return {
        kind: {"handles": live[kind].handles, "bytes": live[kind].bytes, "lost": handles.lost[kind]}
        if kind in live
        else {"handles": 0, "bytes": 0, "lost": handles.lost[kind]}
        for kind in sorted({*live, *handles.lost})
    }


def whereabouts(parts: Parts) -> dict[str, str]:
    """Where every worker stands, and why."""
    return {worker.worker_id: f"{worker.state}: {worker.reason}" for worker in parts.pool.workers.values()}


def hopeless(parts: Parts, plan: Plan, groups: int) -> bool:
    """Whether `groups` groups can never be ready; asked whenever a group becomes ready, so it only compares numbers."""
    if groups > plan.max_groups or (parts.producer.exhausted and _left(parts) < groups):
        return True
    most = parts.producer.mixture.most_groups
    return (most is not None and groups > most) or _no_bytes_left(parts, groups)


def _no_bytes_left(parts: Parts, groups: int) -> bool:
    """Whether ready groups alone fill the buffer, and those under way are too few: nothing more will be admitted."""
    buffer, ledger = parts.buffer, parts.ledger
    if buffer.max_bytes is None or buffer.ready_bytes < buffer.max_bytes:
        return False  # an ack makes room for more
    return buffer.ready + sum(ledger.groups(account) for account in ("queued", "in_flight", "aborted")) < groups


def _left(parts: Parts) -> int:
    """Groups that may still be ready when no source has a prompt any more."""
    return parts.ledger.unsettled_groups + parts.producer.tail.waiting_prompts


def shortage_of(parts: Parts, plan: Plan, groups: int) -> Shortage:
    """Why `groups` groups are not ready in a service that works, and whether they can ever be."""
    ledger = parts.ledger
    detail = {
        "waiting_for": parts.producer.waiting,
        "ledger": ledger.as_json(),
        "workers": whereabouts(parts),
        "failed": dict(parts.tally.failed),
        "last_failure": parts.tally.last_failure,
        "prompts_used": {name: source.as_json()["used"] for name, source in parts.producer.sources.items()},
        "oldest": oldest_samples(parts, OLDEST, ("train",)),
    }
    if groups > plan.max_groups:
        message = f"the plan admits at most {plan.max_groups} groups that are not consumed"
        return Shortage("not_enough", message, detail, final=True)
    most = parts.producer.mixture.most_groups
    if most is not None and groups > most:
        message = f"the tasks' own limits (tasks.N.max_groups) allow {most} groups that are not consumed, in all"
        return Shortage("not_enough", message, detail, final=True)
    if _no_bytes_left(parts, groups):
        ready, size, bound = parts.buffer.ready, parts.buffer.ready_bytes, parts.buffer.max_bytes
        message = f"buffer.max_bytes is {bound}, and {ready} groups take {size} bytes; {groups} of them would take "
        message += f"about {size * groups // max(1, ready)}"
        detail["buffer"] = {"path": "buffer.max_bytes", "max_bytes": bound, "bytes": size, "ready": ready}
        return Shortage("not_enough", message, detail, final=True)
    if parts.producer.exhausted and _left(parts) < groups:
        used = sum(source.as_json()["used"] for source in parts.producer.sources.values())
        message = f"the prompts are used up, all {used}, and {_left(parts)} groups are left under way"
        return Shortage("exhausted", message, detail, final=True)
    if "train" in parts.pauses.closed:
        return Shortage("paused", "the stage is paused", detail)
    waiting = parts.producer.waiting
    message = f"{waiting}: {WORDS[waiting]}" if waiting in WORDS else "groups are under way"
    if parts.tally.last_failure and not parts.buffer.ready:
        message += f"; {sum(parts.tally.failed.values())} attempts failed, last: {parts.tally.last_failure}"
    if (drought := parts.droughts.told()) and not parts.buffer.ready:
        message += f"; {drought}"
    return Shortage("not_enough", message, detail)
