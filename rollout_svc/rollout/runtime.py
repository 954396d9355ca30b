"""A task as it runs: its agent, the desks of its judger and its filter, its settings.

Invariant: everything a task needs is made here, before anything starts, so that a wrong name or option is a
ConfigError with its dotted path and never a failure in the middle of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

from rollout_svc.agent import Agent, OnPause
from rollout_svc.config import Config, FilterConfig, SamplingConfig, TaskConfig
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.filtering import FilterDesk
from rollout_svc.judging.desk import JudgeDesk
from rollout_svc.judging.making import make_desk
from rollout_svc.plugins import construct, resolve

__all__ = ["TaskRuntime", "make_runtimes"]

_ON_PAUSE: Final = get_args(OnPause)


@dataclass(frozen=True, slots=True)
class TaskRuntime:
    """One task, ready to run.

    Attributes:
        partial: whether a sample that was cut goes on from its tokens; None: wherever those can still be used.
    """

    name: str
    agent: Agent
    on_pause: OnPause
    one_turn: bool
    desk: JudgeDesk
    sampling: SamplingConfig
    weight: float
    partial: bool | None = None
    max_groups: int | None = None
    filter: FilterDesk | None = None


def make_runtimes(config: Config) -> dict[str, TaskRuntime]:
    """Make every task's agent, judger and filter.

    Raises:
        ConfigError: with every problem of every task.
    """
    problems: list[Problem] = []
    runtimes: dict[str, TaskRuntime] = {}
    for index, task in enumerate(config.tasks):
        try:
            runtimes[task.name] = _make(task, f"tasks.{index}")
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return runtimes


def _make(task: TaskConfig, path: str) -> TaskRuntime:
    agent: Any = construct(resolve(task.agent, "agents", f"{path}.agent"), f"{path}.agent")
    if not callable(getattr(agent, "run", None)):
        raise ConfigError.at(f"{path}.agent", f"{agent!r} has no method run(sample, ctx)")
    on_pause: Any = task.agent.on_pause or getattr(agent, "on_pause", "park")
    if on_pause not in _ON_PAUSE:
        raise ConfigError.at(f"{path}.agent", f"its on_pause is {on_pause!r}, not abort or park")
    desk = make_desk(task.judger, f"{path}.judger")
    one_turn = bool(getattr(agent, "one_turn", False))
    kept_by = None if task.filter is None else _make_filter(task.filter, f"{path}.filter")
    return TaskRuntime(
        name=task.name,
        agent=agent,
        on_pause=on_pause,
        one_turn=one_turn,
        desk=desk,
        sampling=task.sampling,
        weight=task.weight,
        partial=task.partial_rollout,
        max_groups=task.max_groups,
        filter=kept_by,
    )


def _make_filter(config: FilterConfig, path: str) -> FilterDesk:
    spec = resolve(config, "filters", path)
    plugin: Any = construct(spec, path)
    try:
        return FilterDesk(name=config.name or spec.target, plugin=plugin, timeout_s=config.timeout_s)
    except TypeError as error:
        raise ConfigError.at(path, str(error)) from error
