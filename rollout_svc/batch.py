"""What is handed over: a leased batch, or why there is none.

Invariants:

- The routed experts of a batch are the buffer's. Who has the batch reads them until its ack, or the end of its lease.
- A record is made of what was encoded when each group was done; tokens that are too old are masked in it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rollout_svc.errors import BadRequest, NotNow, NotNowType, SpentHandle
from rollout_svc.group import Group
from rollout_svc.producer.masking import encoded
from rollout_svc.tensors import Loan, ReadHandle

__all__ = ["Batch", "Shortage", "check_take", "is_ahead", "not_now", "too_far"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is nothing to take now, and whether it can ever be met."""

    type: NotNowType
    message: str
    detail: dict[str, Any]
    final: bool = False

    def of_tasks(self, missing: Mapping[str, int]) -> Shortage:
        """The same, where groups of these tasks are what is waited for; none, or for good: as it is."""
        if not missing or self.final:
            return self
        told = ", ".join(f"{number} of task {task}" for task, number in missing.items())
        message = f"by the tasks' weights {told} are missing; {self.message}"
        return replace(self, message=message, detail=self.detail | {"missing": missing})


def is_ahead(step: int, version: int, max_staleness: int, max_token_staleness: int | None) -> bool:
    """Whether every token that the fleet can make now would be too old at `step`."""
    return step - version > (max_staleness if max_token_staleness is None else max_token_staleness)


def too_far(step: int, version: int, max_staleness: int, max_token_staleness: int | None) -> Shortage:
    """Why nothing that the fleet can make now is fresh enough at `step`; not for good: an update may come."""
    bound = max_staleness if max_token_staleness is None else max_token_staleness
    message = f"step {step} needs weights of version {step - bound} or later, the fleet is at {version}"
    detail = {"step": step, "weight_version": version, "max_staleness": max_staleness}
    if max_token_staleness is not None:
        detail["max_token_staleness"] = max_token_staleness
    return Shortage("not_enough", message, detail)


def check_take(step: int, groups: int, timeout_s: float) -> None:
    """Raise BadRequest where no schedule can reckon with these: in process nobody else has looked."""
    for path, value, least in (("step", step, 0), ("groups", groups, 1)):
        if type(value) is not int or value < least:
            raise BadRequest.at(path, f"expected a whole number, {least} or greater")
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise BadRequest.at("timeout_s", "expected a finite number, 0 or greater")


@dataclass(frozen=True, slots=True)
class Batch:
    """A leased batch.

    Attributes:
        groups: COMPLETED groups; their records are encoded already.
        metrics: figures of the batch, and of what happened since the one before.
        ack_expired: batches whose ack came too late, with this take.
        oldest: tokens of older weight versions are masked; None: none is.
        loan: how long its tensors may be read.
    """

    batch_id: str
    step: int
    groups: tuple[Group, ...]
    metrics: dict[str, Any]
    ack_expired: tuple[str, ...] = ()
    oldest: int | None = None
    loan: Loan = field(default_factory=Loan, compare=False)

    def take_experts(self) -> dict[str, ReadHandle]:
        """Routed experts by sample id, of those that have some: `(tokens - 1, moe_layers, top_k)`, uint8 or uint16.

        They stay the buffer's. After the ack of the batch, or the end of its lease, `read` raises SpentHandle, which
        says which of the two it was; what was read before stays readable. Every call gives handles of its own.

        Raises:
            SpentHandle: the batch is not lent any more, which is not to have none; says why.
        """
        if self.loan.ended_by is not None:
            raise SpentHandle(f"routed experts of batch {self.batch_id} were asked for after {self.loan.ended_by}")
        owned = ((sample.sample_id, sample.experts) for group in self.groups for sample in group.samples)
        return {sample_id: ReadHandle(sample_id, heavy, self.loan) for sample_id, heavy in owned if heavy is not None}

    def head(self) -> dict[str, Any]:
        """The record without its groups."""
        head: dict[str, Any] = {"batch_id": self.batch_id, "step": self.step, "metrics": self.metrics}
        return head | ({"ack_expired": self.ack_expired} if self.ack_expired else {})

    def records(self) -> Iterator[bytes]:
        """The records of its groups, as JSON."""
        return (encoded(group, self.oldest) for group in self.groups)

    def encoded(self) -> Iterator[bytes]:
        """The record of the contract as JSON, in pieces to be joined: one per group, so that a loop can breathe."""
        yield orjson.dumps(self.head())[:-1] + b',"groups":['
        for index, record in enumerate(self.records()):
            yield b"," + record if index else record
        yield b"]}"

    def as_json(self) -> dict[str, Any]:
        """The same record as values."""
        record: dict[str, Any] = orjson.loads(b"".join(self.encoded()))
        return record


def not_now(shortage: Shortage, wanted: int, ready: int) -> NotNow:
    """Make the error that says how many of the wanted groups are ready, and what the others wait for."""
    message = f"{ready} of {wanted} groups are ready: {shortage.message}"
    detail = {"ready": ready, "wanted": wanted, "can_be_met": not shortage.final, **shortage.detail}
    return NotNow(shortage.type, message, detail=detail)
