"""What a run has seen so far: one record per step, and the answers of the policy along the way.

Invariants:

- A record is made from what the service reported, a batch and a pause report, never from an estimate.
- `first_reward` and `last_reward` are means over `WINDOW` steps, or over all where there are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.demo.task import MAX_REWARD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PASS_SHARE", "WINDOW", "Answer", "History", "StepRecord", "memory_of"]

WINDOW: Final = 5
"""Steps that a reported reward is the mean of."""
PASS_SHARE: Final = 0.9
"""Share of the attainable reward at which a run has learned the task."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trainer step.

    Attributes:
        step: Trainer steps done before it.
        reward: Mean reward of the batch's samples.
        pause_s: How long generation stood still for the weights: pause, update and resume.
        aborted: Samples that were cut off between the batch before and this one.
        continued: Samples that went on with the tokens they had, in the same time.
        weight_version: Version the engines run after it.
        tokens: Response tokens of the batch.
        elapsed_s: Wall time of the step.
        in_flight: Requests that the engines were working on when the pause came.
        ledger: The service's account at the pause, in samples.
    """

    step: int
    reward: float
    pause_s: float
    aborted: int
    continued: int
    weight_version: int
    tokens: int = 0
    elapsed_s: float = 0.0
    in_flight: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the record of the summary."""
        return {
            "step": self.step,
            "reward": self.reward,
            "pause_s": self.pause_s,
            "aborted": self.aborted,
            "continued": self.continued,
            "weight_version": self.weight_version,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy answers to one prompt, and what it should."""

    prompt: str
    answer: str
    target: str
    reward: float


@dataclass(slots=True)
class History:
    """The run so far."""

    chance_reward: float
    records: list[StepRecord] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def first_reward(self) -> float:
        """Mean reward of the first steps; 0 before the first."""
        return _mean([record.reward for record in self.records[:WINDOW]])

    @property
    def last_reward(self) -> float:
        """Mean reward of the last steps; 0 before the first."""
        return _mean([record.reward for record in self.records[-WINDOW:]])

    @property
    def has_learned(self) -> bool:
        """Whether the last steps reach the share of the attainable reward that counts as learned."""
        return bool(self.records) and self.last_reward >= PASS_SHARE * MAX_REWARD

    @property
    def tokens_per_s(self) -> float:
        """Response tokens a second, over the last steps."""
        recent = self.records[-WINDOW:]
        seconds = sum(record.elapsed_s for record in recent)
        return sum(record.tokens for record in recent) / seconds if seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        return {
            "first_reward": self.first_reward,
            "last_reward": self.last_reward,
            "chance_reward": self.chance_reward,
            "max_reward": MAX_REWARD,
            "steps": [record.as_json() for record in self.records],
            "ledger": self.ledger,
            "memory": self.memory,
        }


def memory_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's summary says of memory, from the service's record of it: the verdict, and resident memory."""
    service = next((process for process in record["processes"] if process["name"] == "service"), None)
    rss = {} if service is None else service["accounts"].get("rss", {})
    return {
        "verdict": record["verdict"],
        "growing": record["growing"],
        "rss_bytes": rss.get("bytes"),
        "first_rss_bytes": rss.get("first_bytes"),
        "rss_bytes_per_step": rss.get("bytes_per_step"),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
