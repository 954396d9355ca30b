"""The record of a batch, as `/openapi.json` describes it: groups, their samples, and figures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_svc.rpc.answers import Natural, Record, Seconds
from rollout_svc.segment import FinishReason

__all__ = ["BatchRecord"]


class Span(Record):
    """Tokens `[start, end)` of `response_ids`, made under one weight version."""

    version: int | None
    """Null where nobody knows: the label is no number, or an update overlapped."""
    start: Natural
    end: Natural
    confirmed: Literal[False] | None = None
    """False, and only there, where the engine reports no versions: the request was dispatched under this one."""


class EarlierSegment(Record):
    """A conversation that a sample's agent did not go on with; its figures are as those of the sample's own."""

    prompt_ids: list[Natural]
    response_ids: list[Natural]
    logprobs: list[float]
    loss_mask: list[Literal[0, 1]]
    weight_versions: list[Span]
    reason: str
    """Why another one began: `history_rewritten: …`, `tools_changed`, `asked_again`, `another_conversation`, or its
    agent's own word."""


class SampleRecord(Record):
    """One answer, judged."""

    sample_id: str
    status: Literal["COMPLETED"]
    finish_reason: FinishReason
    engine_finish_reason: str | None
    """The engine's own word."""
    reward: float
    reward_parts: dict[str, float]
    prompt_ids: list[Natural]
    response_ids: list[Natural]
    logprobs: list[float]
    """Natural logarithms, one per token; 0.0 where the model did not make it."""
    loss_mask: list[Literal[0, 1]]
    """0 where the model did not make the token, or it is older than the bound on tokens allows."""
    weight_versions: list[Span]
    response: str | None
    """Decoded `response_ids`; null without a tokenizer."""
    meta: dict[str, Any]
    earlier_segments: list[EarlierSegment] | None = None
    """Only where it was several conversations: those before the one above, oldest first, with the same reward."""


class PromptRecord(Record):
    """The line that was answered, as it was spelled, and its token ids."""

    id: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[Natural]
    ground_truth: Any
    meta: dict[str, Any]


class GroupRecord(Record):
    """All answers to one prompt."""

    group_id: str
    task: str
    prompt: PromptRecord
    samples: list[SampleRecord]


class Figures(Record):
    """Figures of some groups."""

    groups: Natural
    samples: Natural
    reward_mean: float | None
    """Before any filter: groups that were finished and dropped since the last batch count as well."""
    reward_std: float | None
    reward_samples: Natural
    """How many rewards these two are of."""
    response_length_mean: float | None
    response_length_min: Natural | None
    response_length_max: Natural | None
    staleness: dict[str, Natural]
    """Groups by trainer steps they are behind; `None`: a version is not known."""
    mixed_versions: Natural
    """Samples made under more than one weight version."""
    masked_tokens: Natural
    """Model tokens whose `loss_mask` is 0 because they are behind by more than `trainer.max_token_staleness`."""


class BatchFigures(Figures):
    """Figures of a batch, and of what happened since the one before."""

    max_token_staleness: Natural | None
    """The bound on tokens that the batch was masked with."""
    aborted: Natural
    continued: Natural
    redone: Natural
    failed: dict[str, Natural]
    """Failed attempts by reason."""
    settled: dict[str, Natural]
    """Groups by outcome, and its reason."""
    wait_s: Seconds
    pause_s: Seconds
    tasks: dict[str, Figures]


class BatchRecord(Record):
    """A leased batch."""

    batch_id: str
    step: Natural
    metrics: BatchFigures
    ack_expired: Annotated[list[str], Field(min_length=1)] | None = None
    """Batches of `ack` whose lease has ended; only there when there are some."""
    groups: list[GroupRecord]
