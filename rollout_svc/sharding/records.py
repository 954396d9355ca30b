"""One record of several: status, plan, who is stuck, memory. Pure.

Invariants:

- Every record has the shape that one service's has; counts are added, names hold over all shards.
- What only the coordinator knows (state, ticket, version, which lanes are open, leases) is given by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_svc.gate import LANES
from rollout_svc.sharding.accounts import ledger_sum
from rollout_svc.sharding.naming import joined, named, worker_record
from rollout_svc.stuck import MOST_LISTED

__all__ = ["merge_memory", "merge_plans", "merge_status", "merge_stuck"]

Record = Mapping[str, Any]
Records = Mapping[str, Record]


def merge_status(known: Records, own: Record, ledger: Record) -> dict[str, Any]:
    """The record of `status`.

    Args:
        known: those of the shards, at least one.
        own: what the coordinator says itself; its `lanes` are those that are open.
        ledger: of all shards.
    """
    parts = list(known.values())
    lanes = {
        lane: {
            "open": lane in own["lanes"],
            "in_flight": sum(part["lanes"][lane]["in_flight"] for part in parts),
            "parked": sum(part["lanes"][lane]["parked"] for part in parts),
        }
        for lane in LANES
    }
    kept = [part["trajectories"] for part in parts if part["trajectories"] is not None]
    return {
        "state": own["state"],
        "ticket": own["ticket"],
        "weight_version": own["weight_version"],
        "weights": _weights([part["weights"] for part in parts], own),
        "lanes": lanes,
        "workers": [worker_record(shard, one) for shard, part in known.items() for one in part["workers"]],
        "buffer": _added([part["buffer"] for part in parts], ("ready", "unfinished", "bytes"))
        | {"leases": own["leases"]},
        "producer": _producer({shard: part["producer"] for shard, part in known.items()}),
        "tensors": _by_name([part["tensors"] for part in parts], ("handles", "bytes", "lost")),
        "trajectories": {"path": kept[0]["path"], **_added(kept, ("written", "failed", "bytes"))} if kept else None,
        "judges": {name: one for shard, part in known.items() for name, one in named(shard, part["judges"]).items()},
        "evaluations": _evaluations([part["evaluations"] for part in parts]),
        "sessions": _added([part["sessions"] for part in parts], tuple(parts[0]["sessions"])),
        "ledger": dict(ledger),
        "plan": merge_plans({shard: part["plan"] for shard, part in known.items()}),
        "rss_bytes": sum(part["rss_bytes"] for part in parts),
        "memory": _memory_brief({shard: part["memory"] for shard, part in known.items()}),
        "shards": own["shards"],
    }


def merge_plans(plans: Records) -> dict[str, Any]:
    """The plan in force over all shards; a worker is still told how much by the plan of its own shard."""
    busy = [plan for plan in plans.values() if plan["workers"]] or list(plans.values())
    return {
        "workers": sum(plan["workers"] for plan in plans.values()),
        "required": max(plan["required"] for plan in busy),
        "allowed": min(plan["allowed"] for plan in busy),
        "ratio": max(plan["ratio"] for plan in busy),
        "max_groups": sum(plan["max_groups"] for plan in plans.values()),
        "warnings": [f"{shard}: {words}" for shard, plan in plans.items() for words in plan["warnings"]],
    }


def merge_stuck(records: Records) -> dict[str, Any]:
    """Who is stuck, oldest first."""
    samples = [
        {**sample, "worker": None if sample["worker"] is None else joined(shard, sample["worker"])}
        for shard, record in records.items()
        for sample in record["samples"]
    ]
    groups = [group for record in records.values() for group in record["groups"]]
    samples.sort(key=lambda sample: -float(sample["since_s"]))
    groups.sort(key=lambda group: -float(group["since_s"]))
    return {
        "older_than_s": max(record["older_than_s"] for record in records.values()),
        "counts": _counts(record["counts"] for record in records.values()),
        "samples": samples[:MOST_LISTED],
        "groups": groups[:MOST_LISTED],
        "omitted": sum(record["omitted"] for record in records.values()) + max(0, len(samples) - MOST_LISTED),
        "groups_omitted": sum(r["groups_omitted"] for r in records.values()) + max(0, len(groups) - MOST_LISTED),
    }


def merge_memory(records: Records) -> dict[str, Any]:
    """The record of `memory`: lists are put together, processes have their shard's name before their own."""
    merged: dict[str, Any] = {}
    for shard, record in records.items():
        for key, value in record.items():
            if key == "verdict":
                merged[key] = "; ".join(filter(None, (merged.get(key), f"{shard}: {value}")))
            elif isinstance(value, list):
                merged.setdefault(key, []).extend(_of_shard(shard, one) for one in value)
            else:
                merged.setdefault(key, value)
    parts = list(records.values())
    merged["handles"] = _by_name([part["handles"] for part in parts], ("handles", "bytes"))
    merged["lost"] = _counts(part["lost"] for part in parts)
    return merged | {"holders_omitted": sum(part["holders_omitted"] for part in parts)}


def _of_shard(shard: str, one: Any) -> Any:
    if not isinstance(one, Mapping):
        return one
    return {**one, **{key: f"{shard} {one[key]}" for key in ("name", "process") if isinstance(one.get(key), str)}}


def _weights(parts: Sequence[Record], own: Record) -> dict[str, Any]:
    updating = [part for part in parts if part["state"] == "updating"]
    told = (updating or list(parts))[0]
    return {
        **told,
        "version": own["weight_version"],
        "seconds": max(part["seconds"] for part in parts),
        "error": own["weights_error"] or "; ".join(filter(None, (part["error"] for part in parts))),
    }


def _producer(parts: Records) -> dict[str, Any]:
    records = list(parts.values())
    absent = [record["no_worker_s"] for record in records]
    names = dict.fromkeys(name for record in records for name in record["tasks"])
    sources = dict.fromkeys(name for record in records for name in record["sources"])
    return {
        "waiting_for": _words({shard: record["waiting_for"] for shard, record in parts.items()}),
        "exhausted": all(record["exhausted"] for record in records),
        "no_worker_s": None if None in absent else min(absent),
        "schedule": _schedule([record["schedule"] for record in records if record["schedule"] is not None]),
        "tasks": {
            name: _task({shard: record["tasks"][name] for shard, record in parts.items() if name in record["tasks"]})
            for name in names
        },
        "filtered_in_a_row": _counts(record["filtered_in_a_row"] for record in records),
        "sources": {
            name: _source([record["sources"][name] for record in records if name in record["sources"]])
            for name in sources
        },
    }


def _task(parts: Records) -> dict[str, Any]:
    records = list(parts.values())
    return _added(records, ("admitted", "out", "ready", "leased", "consumed")) | {
        "share": sum(record["share"] for record in records) / len(records),
        "waiting_for": _words({shard: record["waiting_for"] for shard, record in parts.items()}),
    }


def _schedule(parts: Sequence[Record]) -> dict[str, Any] | None:
    if not parts:
        return None
    tails = [part["tail"] for part in parts]
    return {
        "strategy": parts[0]["strategy"],
        "next_step": max(part["next_step"] for part in parts),
        "window": min(part["window"] for part in parts),
        **_added(parts, ("limit", "out")),
        "tail": _added(tails, ("gathered", "left")) | {"round": any(tail["round"] for tail in tails)},
    }


def _source(parts: Sequence[Record]) -> dict[str, Any]:
    epochs = [part["epoch"] for part in parts if part["epoch"] is not None]
    known = [part["known_ids"] for part in parts if part["known_ids"] is not None]
    return {
        "used": sum(part["used"] for part in parts),
        "epoch": min(epochs) if epochs else None,
        "exhausted": all(part["exhausted"] for part in parts),
        "known_ids": sum(known) if known else None,
    }


def _evaluations(parts: Sequence[Record]) -> dict[str, Any]:
    counted = _added(parts, ("under_way", "in_flight", "waiting", "max_in_flight"))
    return counted | {"ledger": ledger_sum(part["ledger"] for part in parts)}


def _memory_brief(parts: Records) -> dict[str, Any]:
    return {
        "verdict": "; ".join(f"{shard}: {part['verdict']}" for shard, part in parts.items()),
        "growing": [_of_shard(shard, one) for shard, part in parts.items() for one in part["growing"]],
    }


def _words(said: Mapping[str, str]) -> str:
    """What shards say; empty where one of them has nothing to say: it works."""
    if not all(said.values()):
        return ""
    return (
        next(iter(said.values())) if len(set(said.values())) == 1 else "; ".join(f"{s}: {w}" for s, w in said.items())
    )


def _added(parts: Sequence[Record], keys: Sequence[str]) -> dict[str, Any]:
    return {key: sum(part[key] for part in parts) for key in keys}


def _by_name(parts: Sequence[Record], keys: Sequence[str]) -> dict[str, Any]:
    names = sorted({name for part in parts for name in part})
    return {name: _added([part[name] for part in parts if name in part], keys) for name in names}


def _counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
