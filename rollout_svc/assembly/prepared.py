"""A configuration, and all of it that can be made and checked without a loop.

Invariant: everything that can be wrong with a configuration is found here, before a loop, a socket or a task exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_svc.config import WHOLE, Config, Portion
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.feasible import infeasible, remarks
from rollout_svc.launching import launch_problems
from rollout_svc.limits import raise_open_file_limit
from rollout_svc.plan import Plan, batch_of, make_plan
from rollout_svc.producer.sources import PromptSource, make_source
from rollout_svc.rollout.runtime import TaskRuntime, make_runtimes
from rollout_svc.tokens import Refused, TextCodec, load_tokenizer, refused_content
from rollout_svc.trajectories import trajectory_problems

__all__ = ["Prepared", "prepare", "worker_ids"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that was found to work."""

    config: Config
    runtimes: dict[str, TaskRuntime]
    sources: dict[str, PromptSource]
    codec: TextCodec
    plan: Plan
    refused: Refused
    portion: Portion = WHOLE


def worker_ids(config: Config) -> list[str]:
    """The ids of the configured workers, in order."""
    return [f"w{index}" for index in range(len(config.workers))]


def prepare(config: Config, portion: Portion = WHOLE) -> Prepared:
    """Make what can be made, and checked, without a loop; reads prompt files and tokenizers.

    Args:
        config: the settings.
        portion: which of the prompts are this service's, where it is a shard.

    Raises:
        ConfigError: with every problem that was found.
    """
    problems: list[Problem] = []
    runtimes: dict[str, TaskRuntime] = {}
    sources: dict[str, PromptSource] = {}
    tokenizer = None
    refused: Refused = {}
    try:
        runtimes = make_runtimes(config)
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
    except ConfigError as error:
        problems.extend(error.problems)
    else:
        refused = refused_content(tokenizer)
    for index, task in enumerate(config.tasks):
        try:
            where = f"tasks.{index}.prompts"
            sources[task.name] = make_source(task.prompts, refused=refused, where=where, portion=portion)
        except ConfigError as error:
            problems.extend(error.problems)
    for index, worker in enumerate(config.workers):
        if worker.launch is not None and config.cluster is None:
            problems += launch_problems(worker.launch, f"workers.{index}.launch")
    problems += _lost_on_the_way(config)
    others = {f"tasks.{index}.prompts.jsonl": task.prompts.jsonl for index, task in enumerate(config.tasks)}
    problems += trajectory_problems(config.trajectories, others | {"buffer.path": config.buffer.path})
    problems += infeasible(config.trainer, config.producer, config.tasks)
    if problems:
        raise ConfigError(problems)
    batches = (batch_of(w.max_batch, len(w.behind), config.trainer) for w in config.workers)
    notes = remarks(config.trainer, config.producer.strategy, config.tasks)
    plan = make_plan(config.trainer, dict(zip(worker_ids(config), batches, strict=True)), notes=notes)
    raise_open_file_limit(plan)
    return Prepared(config, runtimes, sources, TextCodec(tokenizer), plan, refused, portion)


def _lost_on_the_way(config: Config) -> list[Problem]:
    """Sampling settings that a router would drop without a word: known before anybody is asked."""
    return [
        Problem(f"tasks.{number}.sampling.{said.partition(':')[0]}", f"{worker.url}:{said.partition(':')[2]}")
        for worker in config.workers
        if worker.behind
        for number, task in enumerate(config.tasks)
        if (said := RoutedSGLang().refuses(task.sampling)) is not None
    ]
