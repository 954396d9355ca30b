"""The settings of a service.

Invariants:

- A `Config` that exists is valid: every bound and every cross-field rule held when it was made.
- Nothing here reads a file or the environment; `configfile` does.
- Unknown keys are refused everywhere, except beside a plugin's name, where they are the plugin's own (`options`).
- A rule is checked on the smallest part that can break it, so that one reading reports as many problems as there are.
- Secrets stay out of `repr`.
"""

import copy
import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from rollout_svc.config.base import (
    NOT_SUPPORTED,
    Count,
    EntryPoint,
    Listed,
    Seconds,
    Secret,
    Settings,
    T,
    only,
    refuse,
    refuse_repeats,
)
from rollout_svc.config.workers import WorkerConfig, address_of

__all__ = [
    "AgentConfig",
    "BufferConfig",
    "Config",
    "JudgerConfig",
    "PauseConfig",
    "PluginConfig",
    "ProducerConfig",
    "PromptsConfig",
    "Routing",
    "SamplingConfig",
    "ServiceConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainerConfig",
    "is_loopback",
]

OnPause = Literal["abort", "park"]
Strategy = Literal["async", "sync", "disaggregated"]
PauseMode = Literal["abort", "wait", "keep"]
Routing = Literal["least_tokens", "group_affinity", "round_robin"]


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServiceConfig(Settings):
    """Where the control API listens."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to bind; beyond loopback only with a token."""
    port: int = Field(8700, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    token: Secret | None = Field(None, repr=False)
    """Bearer token that every call but `/healthz` and `/readyz` must carry."""

    @model_validator(mode="after")
    def _guarded_beyond_loopback(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise refuse(("host",), f"binding {self.host!r}, beyond loopback, needs service.token")
        return self


class TokenizerConfig(Settings):
    """How the service turns text into tokens and back."""

    path: str | None = Field(None, min_length=1)
    """`bytes`, or a directory with `tokenizer.json`; null: prompts are `input_ids` and responses have no text."""
    chat_template: str | None = Field(None, min_length=1)
    """A Jinja template, or the path of one; null: the one in the tokenizer's directory."""


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


class TrainerConfig(Settings):
    """What the trainer consumes: concurrency is derived from this (`plan`)."""

    train_batch_size: Count = 64
    """Groups in one training batch."""
    prompt_repeat_k: Count = 8
    """Samples in one group."""
    over_sample_threshold: float = Field(0.2, ge=0, le=100)
    """Extra groups to start, as a fraction of the batch."""
    max_batch_per_worker: Count = 64
    """Requests an engine runs at once, where its worker does not say."""
    allow_over_concurrency_ratio: float = Field(1.2, gt=0, le=1000)
    """Requests sent to an engine, as a multiple of what it runs at once."""
    max_staleness: int = Field(1, ge=0, le=1000)
    """Trainer steps by which a group may be behind when it is handed over."""
    update_interval: Count = 1
    """Trainer steps between two weight updates."""
    initial_version: int = Field(0, ge=0)
    """Trainer steps already done in the weights at the start."""


class ProducerConfig(Settings):
    """How work is started."""

    strategy: Strategy = "async"
    """When generation may run ahead of training."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Failures of one sample before its group is given up."""
    no_worker_timeout_s: Seconds | None = None
    """The service fails when it runs without a worker in traffic for this long; null: it waits for one."""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, strategy: Strategy) -> Strategy:
        return only(strategy, "async")


class PauseConfig(Settings):
    """How a pause stops the stage."""

    mode: PauseMode = "abort"
    """What becomes of running requests."""
    deadline_s: Seconds = 30.0
    """A pause has returned, with its report, after this long."""
    abort_interval_s: Seconds = 5.0
    """Longest wait between two aborts of the same survivors."""
    quarantine_s: float = Field(60.0, ge=0)
    """A worker that kept running an abandoned request is left alone this long before it is tried."""


class BufferConfig(Settings):
    """The replay buffer: finished groups that wait for the trainer."""

    path: str | None = None
    """Where the buffer survives a restart; null: in memory."""
    lease_s: Seconds = 3600.0
    """A batch that is not acknowledged for this long goes back."""
    max_bytes: int | None = Field(None, ge=1)
    """Bound on what the buffer holds; null: the plan's bound on groups only."""

    @field_validator("path", "max_bytes")
    @classmethod
    def _in_memory_only(cls, value: T) -> T:
        if value is not None:
            raise ValueError(NOT_SUPPORTED)
        return value


class Config(Settings):
    """All settings of one service."""

    service: ServiceConfig = ServiceConfig()
    """Where the control API listens."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    workers: Listed[WorkerConfig] = ()
    """The engines; may be empty, workers can be added while the service runs."""
    routing: Routing = "least_tokens"
    """Which worker takes a request: who has least in flight, where its group went first, or each in its turn."""
    start_timeout_s: Seconds = 600.0
    """Engines may still be loading: wait this long for them."""
    request_timeout_s: Seconds = 1200.0
    """A generation request that was accepted must be answered in this time."""
    tasks: Listed[TaskConfig]
    """What is to be done; at least one."""
    trainer: TrainerConfig = TrainerConfig()
    """What the trainer consumes."""
    producer: ProducerConfig = ProducerConfig()
    """How work is started."""
    pause: PauseConfig = PauseConfig()
    """How the stage stops."""
    buffer: BufferConfig = BufferConfig()
    """What waits for the trainer."""

    @field_validator("workers")
    @classmethod
    def _unique_addresses(cls, workers: tuple[WorkerConfig, ...]) -> tuple[WorkerConfig, ...]:
        refuse_repeats([worker.url for worker in workers], ("url",), "worker", address_of)
        launched = [worker.launch.fixed_url if worker.launch is not None else None for worker in workers]
        refuse_repeats(launched, ("launch", "port"), "worker", address_of)
        given = {address_of(worker.url) for worker in workers if worker.url is not None}
        for index, url in enumerate(launched):
            if url is not None and address_of(url) in given:
                raise refuse((index, "launch", "port"), f"{url!r} is the url of another worker already")
        return workers

    @model_validator(mode="after")
    def _no_engine_twice(self) -> Self:
        """An engine in two places would be aborted, counted and given weights by both."""
        own = [worker.url or (worker.launch and worker.launch.fixed_url) for worker in self.workers]
        places = {address_of(url): f"worker {index}" for index, url in enumerate(own) if url}
        for index, worker in enumerate(self.workers):
            for nth, url in enumerate(worker.behind):
                place = places.setdefault(address_of(url), f"engine {nth} of worker {index}")
                if place != f"engine {nth} of worker {index}":
                    raise refuse(("workers", index, "engines", nth), f"{url!r} is already {place}")
        return self

    @field_validator("tasks")
    @classmethod
    def _some_of_unique_names(cls, tasks: tuple[TaskConfig, ...]) -> tuple[TaskConfig, ...]:
        if not tasks:
            raise ValueError("a service without a task has no work: give at least one")
        refuse_repeats([task.name for task in tasks], ("name",), "task")
        return tasks
