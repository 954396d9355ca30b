"""The record of an evaluation, as `/openapi.json` describes it: groups of one sample, judged or failed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_svc.rpc.answers import Natural, Record
from rollout_svc.rpc.batch_answer import PromptRecord, SampleRecord

__all__ = ["EvaluationRecord"]

Nothing = Annotated[list[Natural], Field(max_length=0)]


class FailedRecord(Record):
    """An answer that failed for good: no reward, and none of what it had made."""

    sample_id: str
    status: Literal["FAILED"]
    reason: str
    """Why, in a word."""
    finish_reason: None
    engine_finish_reason: None
    reward: None
    reward_parts: Annotated[dict[str, float], Field(max_length=0)]
    prompt_ids: list[Natural]
    """Empty where the prompt itself could not be encoded."""
    response_ids: Nothing
    logprobs: Nothing
    loss_mask: Nothing
    weight_versions: Nothing
    response: None
    meta: dict[str, Any]


class EvaluatedGroup(Record):
    """One prompt and its answer."""

    group_id: str
    task: str
    prompt: PromptRecord
    samples: Annotated[list[SampleRecord | FailedRecord], Field(min_length=1, max_length=1)]


class EvaluationRecord(Record):
    """All answers, in the order of the prompts; their tokens are of one weight version."""

    groups: list[EvaluatedGroup]
