"""A task: its prompts, the loop that answers them, the judger that rates the answers, the filter that drops some.

Invariant: unknown keys are refused everywhere, except beside a plugin's name, where they are the plugin's own.
"""

import copy
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rollout_svc.config.base import Count, EntryPoint, Listed, Seconds, Settings, refuse

__all__ = [
    "AgentConfig",
    "FilterConfig",
    "JudgerConfig",
    "PluginConfig",
    "PromptsConfig",
    "SamplingConfig",
    "TaskConfig",
]

OnPause = Literal["abort", "park"]

_ORDER_OF_A_FILE = ("shuffle", "seed", "epochs")


class PromptsConfig(Settings):
    """Where a task's prompts come from: exactly one of `jsonl`, `source`, `push`."""

    jsonl: str | None = Field(None, min_length=1)
    """A file with one prompt per line; relative to the configuration file."""
    source: EntryPoint | None = None
    """`module:attr`, something to iterate over."""
    push: bool = False
    """Prompts arrive over HTTP."""
    shuffle: bool = True
    """Take the prompts of each pass in a new order."""
    seed: int = Field(0, ge=0)
    """Seed of the order."""
    epochs: Count | None = None
    """Passes over the prompts; null: without end."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [self.jsonl is not None, self.source is not None, self.push]
        if sum(given) != 1:
            raise ValueError("give exactly one of jsonl, source, push")
        return self

    @model_validator(mode="after")
    def _order_of_a_file_only(self) -> Self:
        """What would be ignored is refused: only a file is read in passes."""
        if self.jsonl is None:
            for key in _ORDER_OF_A_FILE:
                if key in self.model_fields_set:
                    raise refuse((key,), "is for jsonl only: a source or a push has an order of its own")
        return self

    @model_serializer(mode="wrap")
    def _without_what_has_no_use(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what `_order_of_a_file_only` refuses: what is written can be read again."""
        record: dict[str, Any] = write(self)
        return record if self.jsonl is not None else {k: v for k, v in record.items() if k not in _ORDER_OF_A_FILE}


class PluginConfig(Settings):
    """A plugin by registered name or by `module:attr`, and the options that are its own."""

    model_config = ConfigDict(extra="allow")

    name: str | None = Field(None, min_length=1)
    """Registered name (entry point)."""
    path: EntryPoint | None = None
    """`module:attr`, for a plugin that is not registered."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not ours: a copy, for the plugin to keep."""
        return copy.deepcopy(self.model_extra or {})

    @model_validator(mode="after")
    def _one_way_to_name_it(self) -> Self:
        if (self.name is None) == (self.path is None):
            raise ValueError("give exactly one of name, path")
        return self


class AgentConfig(PluginConfig):
    """Which agent loop turns a sample into a finished conversation."""

    on_pause: OnPause | None = None
    """What a pause does to a running loop; null: what the loop itself says."""


class JudgerConfig(PluginConfig):
    """Which judger gives samples their rewards."""

    timeout_s: Seconds = 60.0
    """One judge call may take this long."""
    concurrency: Count | None = None
    """Judge calls at once; null: unbounded."""
    requests_per_minute: float | None = Field(None, gt=0, le=6_000_000)
    """Judge calls begun in a minute, spread over it; null: unbounded."""
    on_failure: Literal["fail", "redo"] = "fail"
    """What a failed judge call is: a failure of the sample, or a reason to ask the judger again first."""
    redos: Count = 3
    """Times one call is made again under `on_failure: redo`, at growing distances, before it is a failure."""
    partial: Literal["wait", "fail"] | None = None
    """For judgers of whole groups: a member that failed is made again and waited for (null: this), or ends the
    group."""


class FilterConfig(PluginConfig):
    """Which filter may drop a finished group before it is stored."""

    timeout_s: Seconds = 60.0
    """One call of the filter may take this long."""


class SamplingConfig(Settings):
    """How tokens are drawn; null and empty values are not sent to the engine."""

    max_tokens: Count = 256
    """Model tokens of one turn, over all its segments."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the smallest set of tokens with this probability."""
    top_k: Count | None = None
    """Draw from this many tokens; null: all."""
    stop: Listed[Annotated[str, Field(min_length=1)]] = ()
    """Texts that end a turn."""
    seed: int | None = Field(None, ge=0)
    """Seed of the engine's draws; null: the engine's choice."""
    return_routed_experts: bool = True
    """Ask for the routed experts of this request, where `experts.enabled` does."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as it is."""


class TaskConfig(Settings):
    """One kind of work: prompts, the loop that answers them, the judger that rates the answers."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Unique among the tasks; letters, digits, `_`, `.` and `-`."""
    prompts: PromptsConfig
    """Where prompts come from."""
    agent: AgentConfig = AgentConfig(name="single_turn")
    """The agent loop."""
    judger: JudgerConfig = JudgerConfig(name="exact")
    """The judger."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    weight: float = Field(1.0, gt=0)
    """Share of this task in a batch, relative to the others' weights."""
    partial_rollout: bool | None = None
    """An aborted sample goes on from the tokens it has; false: it is made again from its prompt; null: it goes on
    wherever those tokens can still be used."""
    filter: FilterConfig | None = None
    """What may drop a finished group; null: nothing does."""
    max_groups: Count | None = None
    """Groups of this task that may be admitted and not consumed; null: the plan's bound on all tasks only."""
