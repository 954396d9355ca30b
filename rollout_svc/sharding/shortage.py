"""Why a batch is not there. Pure.

Invariant: who lacks is named, with its own reason; that it can never be is said only where every shard has said so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_svc.batch import Shortage
from rollout_svc.errors import NotNow, NotNowType
from rollout_svc.sharding.gathering import Gathering
from rollout_svc.sharding.members import Members
from rollout_svc.sharding.shares import share_out

__all__ = ["shortage", "undecided"]


def shortage(
    members: Members, gathering: Gathering | None, groups: int, *, paused: bool, ahead: Shortage | None = None
) -> NotNow:
    """Say which shard lacks what.

    Args:
        members: the shards.
        gathering: what they said; None: nobody was asked.
        groups: how many are wanted.
        paused: the stage is.
        ahead: what the fleet makes is too old for the step, which is why nobody has it: each shard's own reason is in
            the detail then.
    """
    ready = gathering.ready if gathering is not None else {}
    final = gathering.final if gathering is not None else {}
    shares = share_out(groups, {member.shard_id: groups for member in members.all})
    shards: dict[str, Any] = {}
    for member in members.all:
        said = final.get(member.shard_id)
        waiting_for = ((member.known or {}).get("producer") or {}).get("waiting_for", "")
        shards[member.shard_id] = {
            "ready": ready.get(member.shard_id, 0),
            "wanted": shares[member.shard_id],
            "reason": member.why or (said.message if said is not None else waiting_for),
            **({"detail": said.detail} if said is not None else {}),
        }
    lacking = {name: told for name, told in shards.items() if told["ready"] < told["wanted"]}
    told = "; ".join(f"{name} has {one['ready']} of {one['wanted']}: {one['reason']}" for name, one in lacking.items())
    hopeless = gathering is not None and gathering.hopeless
    kind: NotNowType = "paused" if paused else "not_enough"
    if hopeless and final:
        kinds = {error.type for error in final.values()}
        kind = "exhausted" if kinds == {"exhausted"} else "failed" if kinds == {"failed"} else kind
    total = sum(ready.values())
    detail = {"ready": total, "wanted": groups, "can_be_met": not hopeless, "shards": shards}
    if ahead is not None and not hopeless:
        return NotNow(
            ahead.type, f"{total} of {groups} groups are ready: {ahead.message}", detail=detail | ahead.detail
        )
    return NotNow(kind, f"{total} of {groups} groups are ready: {told}", detail=detail)


def undecided(members: Members, unseen: Iterable[str], step: int) -> NotNow:
    """Say that a step was lent by an earlier coordinator, and who may still have a part of its batch."""
    shards = {shard: {"reason": members.by_id[shard].why} for shard in unseen}
    told = "; ".join(f"{name}: {one['reason']}" for name, one in shards.items()) or "its parts are being looked at"
    message = f"step {step} was lent before, and its batch is looked for in the shards: {told}"
    return NotNow("not_enough", message, detail={"can_be_met": True, "shards": shards})
