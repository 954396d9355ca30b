"""The bodies of the control API, as strict models: what they refuse is a 400 with the path of the field.

Invariants:

- A body that passed is a value; nothing in it is shared with the service's own settings.
- `arguments` is what the service is called with, whichever way the body came.
- The schemas of `/openapi.json` are made of these: where a rule is one that JSON Schema has words for, it says it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from rollout_svc.config import Listed, SamplingConfig, TrainerConfig, WorkerConfig
from rollout_svc.engines.memory import TAGS, Tag
from rollout_svc.evaluations.request import MAX_PROMPTS
from rollout_svc.gate import LANES, Lane
from rollout_svc.weights.probe import DEFAULT_TOLERANCE, MAX_PROMPT, MAX_RESPONSE

__all__ = [
    "Ack",
    "AsSpoken",
    "Batch",
    "Checkpoint",
    "Concurrency",
    "EndSession",
    "Evaluation",
    "OpenSession",
    "Pause",
    "PromptLine",
    "Prompts",
    "ReportReward",
    "Resume",
    "Stuck",
    "Weights",
    "Worker",
]

_MOST: Final = 2**63 - 1  # the largest number that every JSON reader of a signed 64 bit integer knows
DeadlineS = Annotated[float, Field(gt=0, le=86_400)]
Version = Annotated[int, Field(ge=0, le=_MOST)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ticket = Annotated[int, Field(ge=-_MOST, le=_MOST)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class Pause(Body):
    """How to stop."""

    mode: Literal["abort", "wait", "keep"] | None = None
    """What becomes of running requests; null: as configured."""
    deadline_s: DeadlineS | None = None
    """Seconds until the answer; null: as configured."""
    lanes: Annotated[Listed[Lane], WithJsonSchema({"type": "array", "items": {"enum": list(LANES)}, "minItems": 1})] = (
        LANES
    )
    """What to stop; `keep` takes both."""
    if_ticket: Ticket | None = None
    """Only if this is the number of the last pause."""
    kv: Literal["keep", "drop"] = "keep"
    """In mode `keep`: whether frozen requests keep their KV cache."""
    offload: Annotated[Listed[Tag], WithJsonSchema({"type": "array", "items": {"enum": list(TAGS)}})] = ()
    """What idle engines give up until the resume; not in mode `keep`, and for both lanes."""

    @field_validator("lanes")
    @classmethod
    def _some(cls, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        """Refuse none; a length on the field would count an unknown lane as missing and complain twice."""
        if not lanes:
            raise ValueError(f"expected some of {', '.join(LANES)}")
        return lanes

    def arguments(self) -> dict[str, Any]:
        """For `RolloutService.pause`."""
        return self.model_dump()


class Stuck(Body):
    """`GET /v1/stuck`, its query: words of an address, so numbers come as text."""

    model_config = ConfigDict(strict=False)

    older_than_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds under way; not given: what a pause may take."""


class Resume(Body):
    """Which pause to end, and what must hold."""

    ticket: Ticket | None = None
    """Only if this is the current ticket."""
    weight_version: Version | None = None
    """Only if every worker in traffic reports this version."""


class Batch(Body):
    """Which batch to take."""

    step: Annotated[int, Field(ge=0, le=_MOST)]
    """Trainer steps done so far."""
    groups: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many groups."""
    timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """How long to wait for them."""
    ack: Listed[str] = ()
    """Batches to acknowledge first."""


class Ack(Body):
    """Nothing to say."""


class Checkpoint(Body):
    """Where a snapshot goes."""

    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    """A file on the service's machine: a new one, or a snapshot, which is replaced."""
    step: Version
    """Trainer steps done."""
    ack: Listed[str] = ()
    """Batches to acknowledge first."""


Message = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]}),
]
_CONTENT: Final = {"messages": "array", "text": "string", "input_ids": "array"}


class PromptLine(Body):  # it describes and does not check: `producer.lines` does, for files and sources too
    """One prompt, with exactly one of `messages`, `text` and `input_ids`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [key], "properties": {key: {"type": kind}}} for key, kind in _CONTENT.items()]
        }
    )

    id: str = ""
    """What it is called; empty: the hash of the line. The same id in a task is accepted once."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """A conversation, for the chat template."""
    text: str | None = None
    """Text, to be encoded as it is."""
    input_ids: Annotated[list[Annotated[int, Field(ge=0, le=_MOST)]], Field(min_length=1)] | None = None
    """Token ids."""
    ground_truth: Any = None
    """What the judger compares with."""
    meta: dict[str, Any] | None = None
    """Handed on with the batch."""
    engine_extra: dict[str, Any] | None = None
    """Top-level keys for the engine's request."""


DescribedLine = Annotated[dict[str, Any], WithJsonSchema(PromptLine.model_json_schema())]


class Prompts(Body):
    """Prompts for a task."""

    task: str
    """The name of the task."""
    prompts: list[DescribedLine]
    """One or more."""


class KnownAnswer(Body):
    """What the new weights generate: greedily, at temperature 1."""

    prompt_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT)]
    response_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_RESPONSE)]
    """With the stop token, where it ends with one."""
    logprobs: Annotated[list[float], Field(min_length=1, max_length=MAX_RESPONSE)]
    """One for each of `response_ids`."""
    tolerance: Annotated[float, Field(gt=0)] = DEFAULT_TOLERANCE
    """By how much a logprob may differ."""
    every: bool = False
    """Ask engines too that report the weight version themselves."""


class OpenSession(Body):
    """Which sample's session to take."""

    task: str
    """The name of the task."""
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """How long to wait for one."""


class AsSpoken(BaseModel):
    """A request in the words of the API that is spoken; its reader checks it."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The whole conversation."""


class ReportReward(Body):
    """What a sample's agent, or whoever watches it, makes of it."""

    reward: float


class EndSession(Body):
    """How a session ended."""

    error: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """Why its agent failed, which fails its sample; null: it did not."""


class WeightSource(Body):
    """Where new weights come from."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": "disk"}}},
                    "then": {"required": ["path"], "properties": {"path": {"type": "string"}}},
                },
                {
                    "if": {"properties": {"kind": {"enum": ["shm", "cuda_ipc", "distributed"]}}},
                    "then": {"required": ["publisher"], "properties": {"publisher": {"type": "string"}}},
                },
            ]
        }
    )

    kind: Literal["disk", "external", "shm", "cuda_ipc", "distributed"]
    """`disk`: engines load them from `path`; `shm`: from a `WeightPublisher`, through shared memory; `cuda_ipc`: from
    one, where they lie on the device; `distributed`: from one, through a `torch.distributed` group; `external`: the
    trainer has moved them itself."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """For `disk`: a directory that the engines can read."""
    publisher: Annotated[str, Field(pattern=r"^http://")] | None = None
    """For `shm`, `cuda_ipc` and `distributed`: the publisher's address; but for the last on the engines' machine."""
    token: Annotated[str, Field(min_length=1)] | None = None
    """For those: what the publisher asks for."""
    workers: Listed[str] | None = None
    """For `external`: the ids of those that were given the weights; null: every worker in traffic."""
    check_finite: bool = False
    """For `disk`: look through the files for NaN and infinity before anything is stopped."""
    check_names: bool = True
    """For `disk`: refuse files with other tensors than the weights before them, where those are known."""
    probe: KnownAnswer | None = None
    """What every engine that reports no versions has to generate before it gets traffic; null: it is not asked."""


class Weights(Body):
    """Which weights."""

    version: Version
    """Trainer steps whose weights these are."""
    source: WeightSource
    """Where they come from."""
    pause: Pause | None = None
    """While running: pause like this, update, resume."""
    force: bool = False
    """Also a version that is not greater than the fleet's: the same once more, or an earlier one."""

    def arguments(self) -> dict[str, Any]:
        """For `RolloutService.update_weights`."""
        source = self.source.model_dump(exclude_none=True, exclude_defaults=True)
        pause = None if self.pause is None else self.pause.arguments()
        return {"version": self.version, "source": source, "pause": pause, "force": self.force}


def _without_defaults(schema: dict[str, Any]) -> None:
    """A key that is not given stays as it is."""
    for field in schema["properties"].values():
        field.pop("default", None)


class Sampling(SamplingConfig):
    """How tokens are drawn; keys that are not given stay as the task has them."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)


class Evaluation(Body):
    """Prompts to be answered and judged beside training."""

    task: str
    """Whose agent, judger and sampling."""
    prompts: Annotated[list[DescribedLine], Field(min_length=1, max_length=MAX_PROMPTS)]
    """Each is answered once."""
    sampling: Sampling | None = None
    """Laid over the task's sampling, for this evaluation only."""
    version: Version | None = None
    """The weight version it is for; null: the fleet's when it begins."""
    timeout_s: Annotated[float, Field(ge=0, le=86_400)]
    """Seconds for all of it."""

    def arguments(self) -> dict[str, Any]:
        """For `RolloutService.evaluate`; of the sampling only what was given."""
        sampling = None if self.sampling is None else self.sampling.model_dump(exclude_unset=True)
        how = {"sampling": sampling, "version": self.version, "timeout_s": self.timeout_s}
        return {"task": self.task, "prompts": self.prompts} | how


class Trainer(TrainerConfig):
    """What the trainer consumes; keys that are not given stay."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)


class Concurrency(Body):
    """One of the two, or both."""

    trainer: Trainer = Field(default_factory=Trainer)
    """What the trainer consumes."""
    limits: dict[str, Annotated[int, Field(ge=1, le=1_000_000)]] = Field(default_factory=dict)
    """Requests at once, by worker id."""

    def arguments(self) -> dict[str, Any]:
        """For `RolloutService.set_concurrency`; of the trainer's numbers only those given."""
        return {"trainer": self.trainer.model_dump(exclude_unset=True), "limits": self.limits}


class Worker(WorkerConfig):
    """An engine, with the keys that it has in the configuration."""

    url: Annotated[
        str | None, WithJsonSchema({"type": ["string", "null"], "pattern": r"^[Hh][Tt][Tt][Pp][Ss]?://[^@?#\s]+$"})
    ] = None
    """`http://` or `https://` address of the engine, unique in the fleet; null where it is launched."""
