"""The settings of a service.

Invariants:

- A `Config` that exists is valid: every bound and every cross-field rule held when it was made.
- Nothing here reads a file or the environment; `configfile` does.
- Unknown keys are refused everywhere, except beside a plugin's name, where they are the plugin's own (`options`).
- A rule is checked on the smallest part that can break it, so that one reading reports as many problems as there are.
- Secrets stay out of `repr`.
"""

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollout_svc.config.base import Count, Listed, Seconds, Secret, Settings, refuse, refuse_repeats
from rollout_svc.config.cluster import Cluster
from rollout_svc.config.sharded import shard_misfits
from rollout_svc.config.tasks import TaskConfig
from rollout_svc.config.workers import WorkerConfig, address_of, launch_misfit
from rollout_svc.tool_calls import ToolFormat

__all__ = [
    "BufferConfig",
    "Config",
    "EvaluationConfig",
    "ExpertsConfig",
    "JournalConfig",
    "JudgesConfig",
    "MemoryConfig",
    "PauseConfig",
    "ProducerConfig",
    "Routing",
    "ServiceConfig",
    "SessionsConfig",
    "Strategy",
    "TokenizerConfig",
    "TrainerConfig",
    "TrajectoriesConfig",
    "WeightsConfig",
    "is_loopback",
]

Strategy = Literal["async", "sync", "disaggregated"]
PauseMode = Literal["abort", "wait", "keep"]
Synchronous = Literal["normal", "full"]
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
    public_url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$")
    """Where agents reach this service, as in `http://rollout.example:8700`; null: the address it is bound to."""

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
    max_token_staleness: int | None = Field(None, ge=0, le=1000)
    """Tokens that are behind by more are masked; null: none is. At most `max_staleness`."""
    update_interval: Count = 1
    """Trainer steps between two weight updates."""
    initial_version: int = Field(0, ge=0)
    """Trainer steps already done in the weights at the start."""


class ProducerConfig(Settings):
    """How work is started."""

    strategy: Strategy = "async"
    """How far generation may run ahead of training: not at all, one batch and its surplus, or as far as the bound."""
    shards: int = Field(1, ge=1, le=256)
    """Producer shards: event loops that divide workers, prompts and budget among them; more than one on a cluster."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Failures of one sample before its group is given up."""
    no_worker_timeout_s: Seconds | None = None
    """The service fails when it runs without a worker in traffic for this long; null: it waits for one."""
    tail_batch_size: Count | None = None
    """Groups that expired or were aborted again and again gather until there are so many, then go first; null: off."""
    tail_after_aborts: Count = 2
    """Pauses that have to cut a group before it counts as aborted again and again."""


class SessionsConfig(Settings):
    """Sessions: turns for agents that speak OpenAI's or Anthropic's API."""

    hold_s: Seconds = 60.0
    """A turn that is asked for during a pause waits this long for its end, and is then refused with 503."""
    ttl_s: Seconds = 600.0
    """A session that asks for nothing for this long is over; pauses do not count."""
    max: Count = 1024
    """Sessions at once; a sample that finds no room waits for it, `ttl_s` at most."""
    tool_format: ToolFormat = "hermes"
    """How the model writes calls of tools."""


class EvaluationConfig(Settings):
    """Evaluations: lane `eval`, counted and limited apart from training."""

    max_in_flight: Count = 64
    """Evaluation requests under way at once, over all workers."""


class ExpertsConfig(Settings):
    """Routed experts of a mixture-of-experts model, kept with each sample so that a trainer can replay the routing.

    What an engine does not say of its model has to be said here; what is said by both has to agree.
    """

    enabled: bool = False
    """Ask engines for them, wherever a request's sampling says so too; evaluations never do."""
    num_experts: int | None = Field(None, ge=1, le=65536)
    """Experts of a layer."""
    top_k: Count | None = None
    """Experts a token goes through in one layer."""
    layers: Count | None = None
    """Hidden layers of the model, dense ones included."""
    moe_layers: Listed[Annotated[int, Field(ge=0)]] | None = None
    """Indices of the layers that have experts; null: all."""
    max_bytes: int = Field(2**30, ge=1)
    """Most bytes of one answer's routed experts; more is refused."""
    store: Literal["memory", "shared", "ray"] = "memory"
    """Where they lie until the batch is acknowledged: in the service, in shared memory, in Ray's object store."""
    ray_address: str = Field("auto", min_length=1)
    """The Ray cluster that LMDeploy's Ray executor, the store, or a launched engine's placement group is on."""

    @field_validator("moe_layers")
    @classmethod
    def _some_layers_each_once(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and (not layers or len(set(layers)) < len(layers)):
            raise ValueError("name at least one layer, and each once; null: all")
        return layers

    @model_validator(mode="after")
    def _layers_that_are_there(self) -> Self:
        if self.moe_layers and self.layers is not None and max(self.moe_layers) >= self.layers:
            raise refuse(("moe_layers",), f"layer {max(self.moe_layers)} of {self.layers}, counted from 0")
        if None not in (self.top_k, self.num_experts) and (self.top_k or 0) > (self.num_experts or 0):
            raise refuse(("top_k",), f"{self.top_k} of {self.num_experts} experts")
        return self


class MemoryConfig(Settings):
    """The watch on memory and disk: what grows with the steps is named."""

    debug: bool = False
    """Keep a list of every live tensor handle with its holder, and look for tensors of torch on the CPU."""
    window_steps: int = Field(20, ge=5, le=1000)
    """Steps a growth is measured over."""
    growth: float = Field(0.01, gt=0, le=1)
    """Growth of one step, as a fraction, that is warned about once it has held over the window."""


class TrajectoriesConfig(Settings):
    """A record of every finished group, for people and their tools."""

    path: str | None = Field(None, min_length=1)
    """A file for JSON lines, rotated by size; null: none is written. Relative to the configuration file."""
    max_file_bytes: int = Field(256 * 2**20, ge=2**10)
    """A file that has grown to this is set aside as `<path>.1`, the one before as `<path>.2`, and so on."""
    max_files: Count | None = None
    """Files that are kept, the one being written included; null: all."""


class JournalConfig(Settings):
    """How the journal at `buffer.path` is kept."""

    partial_interval_s: Seconds = 1.0
    """Tokens of running samples are journalled this often, where their worker streams."""
    synchronous: Synchronous = "normal"
    """`normal` loses nothing when the process is killed; `full` nothing at a power cut either, at the disk's pace."""
    keep_steps: Count = 64
    """Trainer steps for which the prompts of consumed groups are kept, so that an earlier step can be restored."""


class JudgesConfig(Settings):
    """Processes in which synchronous judgers, and tools, run."""

    processes: int = Field(2, ge=1, le=1024)
    """Calls at once; they share the machine with the service."""


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


class WeightsConfig(Settings):
    """How new weights reach the engines, and what becomes of an update that fails at some of them."""

    on_failure: Literal["stop", "rollback", "quarantine"] = "stop"
    """`stop`: the stage stays paused, whoever failed is out and named. `rollback`: likewise, and the others are back at
    the version before. `quarantine`: whoever failed is out and named, and the stage goes on with the others."""
    update_timeout_s: Seconds | None = None
    """Each step of an update has to be answered in this time; null: `request_timeout_s`."""
    check_files: bool = True
    """Look at the files of a `disk` update, where they are on this machine, before anything is stopped."""


class BufferConfig(Settings):
    """The replay buffer: finished groups that wait for the trainer."""

    path: str | None = Field(None, min_length=1)
    """A file in which the buffer survives a restart; null: in memory. Relative to the configuration file."""
    lease_s: Seconds = 3600.0
    """A batch that is not acknowledged for this long goes back."""
    max_bytes: int | None = Field(None, ge=1)
    """Bytes of finished groups at which nothing new is started; null: the plan's bound on groups only."""


class Config(Settings):
    """All settings of one service."""

    service: ServiceConfig = ServiceConfig()
    """Where the control API listens."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    workers: Listed[WorkerConfig] = ()
    """The engines; may be empty, workers can be added while the service runs."""
    cluster: Cluster = None
    """The Ray cluster that launched engines run on; null: this machine."""
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
    judges: JudgesConfig = JudgesConfig()
    """Where synchronous judgers run."""
    pause: PauseConfig = PauseConfig()
    """How the stage stops."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engines."""
    buffer: BufferConfig = BufferConfig()
    """What waits for the trainer."""
    journal: JournalConfig = JournalConfig()
    """How what waits is made durable."""
    sessions: SessionsConfig = SessionsConfig()
    """Agents that speak an API of their own."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What runs beside training."""
    experts: ExpertsConfig = ExpertsConfig()
    """Routed experts, for those who train a mixture of experts."""
    memory: MemoryConfig = MemoryConfig()
    """What is watched for leaks."""
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    """What is written down of every finished group."""

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

    @model_validator(mode="after")
    def _can_be_divided(self) -> Self:
        for where, words in shard_misfits(self):
            raise refuse(where, words)
        return self

    @property
    def ray_address(self) -> str:
        """Of the Ray cluster, for whatever needs one."""
        return self.experts.ray_address if self.cluster is None else self.cluster.address

    @model_validator(mode="after")
    def _launches_fit_the_cluster(self) -> Self:
        for index, worker in enumerate(self.workers):
            problem = (
                None if worker.launch is None else launch_misfit(worker.launch, on_cluster=self.cluster is not None)
            )
            if problem is not None:
                raise refuse(("workers", index, "launch", problem[0]), problem[1])
        return self

    @field_validator("tasks")
    @classmethod
    def _some_of_unique_names(cls, tasks: tuple[TaskConfig, ...]) -> tuple[TaskConfig, ...]:
        if not tasks:
            raise ValueError("a service without a task has no work: give at least one")
        refuse_repeats([task.name for task in tasks], ("name",), "task")
        return tasks
