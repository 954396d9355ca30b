"""The size of a history, drawn from its seed: fleet, tasks, groups, and the times that matter.

Invariant: pure; equal seeds have equal shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, get_args

from rollout_svc.config import (
    AgentConfig,
    BufferConfig,
    Config,
    FilterConfig,
    JudgerConfig,
    PauseConfig,
    ProducerConfig,
    PromptsConfig,
    Routing,
    SamplingConfig,
    Strategy,
    TaskConfig,
    TrainerConfig,
    WeightsConfig,
    WorkerConfig,
)
from tests.simulation.routing import ROUTED

__all__ = ["MODES", "Shape", "draw_shape"]

MODES = ("abort", "wait", "keep")
"""Modes of pausing that histories use."""
_HERE: Final = "tests.simulation"
MAX_TOKENS: Final = 24
_JOURNALLED: Final = 0.5
"""Share of histories whose service goes on from a journal."""
PUSHED: Final = "p"
FILTER_TIMEOUT_S: Final = 1.5
_FILTERED: Final = 0.3  # share of the tasks that have a filter
_ROUTED: Final = 0.22  # share of the histories whose samples have routed experts
_UNROUTED: Final = 0.2  # share of the tasks that want none


@dataclass(frozen=True, slots=True)
class Shape:
    """One history's settings."""

    config: Config
    urls: tuple[str, ...]
    engine_batch: int
    prompts: int
    tasks: tuple[str, ...]
    trainers: int
    group_size: int
    journalled: bool


_AGENTS: Final = {"plain": "Plain", "tool": "ToolUser", "unruly": "Unruly"}


def draw_shape(seed: int | str) -> Shape:
    """Draw the shape of a seed."""
    rng = Random(f"{seed}:shape")
    urls = tuple(f"http://10.0.0.{index + 1}:30000" for index in range(rng.choice((2, 2, 3))))
    names = rng.choice((("plain",), ("plain", "tool"), ("plain", "unruly"), ("unruly", "tool"), ("tool",)))
    group_size = rng.choice((2, 2, 3))
    batch = rng.choice((2, 3, 4))
    planned = Random(f"{seed}:schedule")
    strategy = planned.choice(get_args(Strategy))
    tail = planned.choice((None, None, 1, batch))
    config = Config(
        workers=tuple(WorkerConfig(url=url, dialect="sglang") for url in urls),
        routing=Random(f"{seed}:routing").choice(get_args(Routing)),
        start_timeout_s=600.0,
        request_timeout_s=rng.choice((1.5, 6.0, 12.0)),
        tasks=tuple(_task(name, rng, planned.choice((None, None, False))) for name in names),
        trainer=TrainerConfig(
            train_batch_size=batch,
            prompt_repeat_k=group_size,
            over_sample_threshold=rng.choice((0.0, 0.5, 1.0)),
            max_batch_per_worker=rng.choice((2, 4, 8)),
            max_staleness=min(rng.choice((1, 2, 3)), planned.choice((0, 1, 3, 3, 3))),
        ),
        producer=ProducerConfig(
            strategy=strategy,
            tail_batch_size=tail,
            tail_after_aborts=2 if tail is None else planned.choice((1, 2, 3)),
        ),
        pause=PauseConfig(
            deadline_s=rng.choice((0.5, 2.0, 5.0)),
            abort_interval_s=rng.choice((0.2, 1.0)),
            quarantine_s=rng.choice((1.0, 5.0)),
        ),
        weights=WeightsConfig(
            on_failure=Random(f"{seed}:on_failure").choice(("stop", "rollback", "quarantine")),
            check_files=False,  # there are neither files nor threads
        ),
        buffer=BufferConfig(lease_s=rng.choice((3.0, 30.0))),
    )
    config = _filtered(_handed_over(config, Random(f"{seed}:hand_over")), Random(f"{seed}:filter"))
    return Shape(
        config=_routed(config, Random(f"{seed}:rows")),
        urls=urls,
        engine_batch=rng.choice((2, 4, 8)),
        prompts=rng.randint(16, 20),
        tasks=names,
        trainers=rng.choice((1, 1, 2)),
        group_size=group_size,
        journalled=Random(f"{seed}:journal").random() < _JOURNALLED,
    )


def _handed_over(config: Config, rng: Random) -> Config:
    """Draw what a trainer is handed: the bound on tokens, the mix, and how much may be kept for it."""
    bound = rng.choice((None, None, *range(config.trainer.max_staleness + 1)))
    batch = config.trainer.train_batch_size
    # Limits below a batch in all are refused at the start: the last task has none of its own then.
    limits = [*(rng.choice((None, None, 1, 3)) for _ in config.tasks[1:]), rng.choice((None, None, batch))]
    tasks = tuple(
        task.model_copy(update={"weight": rng.choice((1.0, 1.0, 3.0)), "max_groups": limit})
        for task, limit in zip(config.tasks, limits, strict=True)
    )
    most = rng.choice((None, None, None, 1000, 6000))
    return config.model_copy(
        update={
            "tasks": tasks,
            "trainer": config.trainer.model_copy(update={"max_token_staleness": bound}),
            "buffer": config.buffer.model_copy(update={"max_bytes": most}),
        }
    )


def _filtered(config: Config, rng: Random) -> Config:
    """Draw whose groups are filtered."""
    fickle = FilterConfig(path=f"{_HERE}.filters:FickleFilter", timeout_s=FILTER_TIMEOUT_S)
    tasks = tuple(
        task.model_copy(update={"filter": fickle if rng.random() < _FILTERED else None}) for task in config.tasks
    )
    return config.model_copy(update={"tasks": tasks})


def _routed(config: Config, rng: Random) -> Config:
    """Draw whether samples have routed experts, and which tasks want none."""
    if rng.random() >= _ROUTED:
        return config
    tasks = tuple(
        task.model_copy(
            update={"sampling": task.sampling.model_copy(update={"return_routed_experts": rng.random() >= _UNROUTED})}
        )
        for task in config.tasks
    )
    return config.model_copy(update={"tasks": tasks, "experts": ROUTED})


def _task(name: str, rng: Random, partial: bool | None) -> TaskConfig:
    judge = rng.choice(("SampleJudge", "SampleJudge", "GroupJudge"))
    return TaskConfig(
        name=name,
        prompts=PromptsConfig(push=True),
        agent=AgentConfig(path=f"{_HERE}.agents:{_AGENTS[name]}"),
        judger=JudgerConfig(
            path=f"{_HERE}.judges:{judge}",
            timeout_s=rng.choice((1.5, 4.0)),
            concurrency=rng.choice((None, None, 2)),
        ),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        partial_rollout=partial,
    )
