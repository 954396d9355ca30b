"""One evaluation under way: its groups, in the order of its prompts, and which of them wait to be started.

Invariants:

- A group is idle, under way, or finished: COMPLETED, or FAILED for good. What is finished is counted once.
- An error ends it: nothing of it is started any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

import orjson

from rollout_svc.errors import ServiceError
from rollout_svc.group import Group
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.sample import Sample

__all__ = ["Evaluation", "encoded_records", "record_of", "records_of"]


class Evaluation:
    """See the module's invariants.

    Attributes:
        wanted: how many prompts it has.
        version: the weight version all of its tokens are to be of; None: it has not begun.
        groups: those admitted so far.
        idle: those of them that wait to be started, or to go on.
        generating: those inside their agent loop.
        finished: those that have their answer, or failed for good.
        error: why it cannot go on.
        changed: set whenever one of these moved.
    """

    __slots__ = (
        "changed",
        "error",
        "evaluation_id",
        "finished",
        "generating",
        "groups",
        "idle",
        "runtime",
        "version",
        "wanted",
    )

    def __init__(self, *, evaluation_id: str, runtime: TaskRuntime, wanted: int, version: int | None) -> None:
        self.evaluation_id = evaluation_id
        self.runtime = runtime
        self.wanted = wanted
        self.version = version
        self.groups: list[Group] = []
        self.idle: deque[Group] = deque()
        self.generating = 0
        self.finished = 0
        self.error: ServiceError | None = None
        self.changed = asyncio.Event()

    def __repr__(self) -> str:
        counts = f"{self.finished}/{self.wanted} idle={len(self.idle)} generating={self.generating}"
        return f"<Evaluation {self.evaluation_id} v{self.version} {counts} {self.error or ''}>"

    @property
    def complete(self) -> bool:
        """Whether every prompt has its answer, or failed for good."""
        return self.finished == self.wanted

    @property
    def waiting(self) -> int:
        """Prompts that nobody works for."""
        return self.wanted - len(self.groups) + len(self.idle)

    @property
    def failed(self) -> int:
        """Groups that failed for good."""
        return sum(group.account == "failed" for group in self.groups)

    def due(self, now: float) -> bool:
        """Whether a group may be started now; `now` is loop time."""
        return self.error is None and any(group.not_before <= now for group in self.idle)

    def earliest(self) -> float | None:
        """When the next group may be started, loop time; None when none waits."""
        return None if self.error is not None else min((group.not_before for group in self.idle), default=None)

    def next(self, now: float) -> Group:
        """Take the first group out that may be started now; the caller has asked `due`."""
        group = next(group for group in self.idle if group.not_before <= now)
        self.idle.remove(group)
        self.changed.set()
        return group

    def end(self, error: ServiceError) -> None:
        """It cannot go on, unless it is complete; the first reason counts."""
        if not self.complete:
            self.error = self.error or error
            self.changed.set()


def record_of(group: Group) -> bytes:
    """A group's record, JSON: as in a batch, and of one that failed its status and its reason, with no reward."""
    if group.account != "failed":
        return group.encoded()
    prompt = group.prompt
    samples = [_failed(sample) for sample in group.samples]
    return orjson.dumps(
        {"group_id": group.group_id, "task": prompt.task, "prompt": prompt.as_json(), "samples": samples}
    )


async def records_of(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The same of many, decoded; the loop breathes in between."""
    records = []
    for group in groups:
        records.append(orjson.loads(record_of(group)))
        await asyncio.sleep(0)
    return records


async def encoded_records(groups: Iterable[Group]) -> list[bytes]:
    """The answer that has them, JSON, in pieces; the loop breathes in between: many answers must not hold it."""
    pieces = [b'{"groups":[']
    for index, group in enumerate(groups):
        pieces.append(b"," + record_of(group) if index else record_of(group))
        await asyncio.sleep(0)
    return [*pieces, b"]}"]


def _failed(sample: Sample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "status": str(sample.status),
        "reason": sample.reason,
        "finish_reason": None,
        "engine_finish_reason": None,
        "reward": None,
        "reward_parts": {},
        "prompt_ids": sample.prompt_ids,
        "response_ids": [],
        "logprobs": [],
        "loss_mask": [],
        "weight_versions": [],
        "response": None,
        "meta": sample.meta,
    }
