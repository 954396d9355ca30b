"""Making a judger's desk, and those of the judgers it asks, from settings.

A judger that is made of others has `others`: settings of each, as in a task's `judger`, under its dotted path below
this one (`parts.format`). It asks them with `self.ask(path, sample)`, which is there before its first call.

Invariant: whatever is wrong with any of them is a ConfigError at its dotted path, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollout_svc.config import JudgerConfig
from rollout_svc.configfile import problems_of
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.judging.desk import JudgeDesk
from rollout_svc.plugins import construct, resolve

__all__ = ["make_desk", "parts_of"]


def make_desk(config: JudgerConfig, path: str) -> JudgeDesk:
    """Make a judger and its desk.

    Raises:
        ConfigError: with every problem of it and of those it asks.
    """
    spec = resolve(config, "judgers", path)
    judger: Any = construct(spec, path)
    if not any(callable(getattr(judger, method, None)) for method in ("judge", "judge_group")):
        raise ConfigError.at(path, f"{judger!r} has no method judge(sample) or judge_group(samples)")
    desk = JudgeDesk(
        name=config.name or spec.target,
        judger=judger,
        spec=spec,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
        per_minute=config.requests_per_minute,
        redos=config.redos if config.on_failure == "redo" else 0,
        partial=config.partial or "wait",
        parts=parts_of(judger, config.timeout_s, path),
    )
    if config.partial is not None and not desk.by_group:
        raise ConfigError.at(f"{path}.partial", "is for judgers of whole groups: this one judges one sample at a time")
    if desk.parts and (desk.by_group or not desk.is_async):
        raise ConfigError.at(path, f"{judger!r} asks other judgers, so its judge(sample) has to be async")
    return desk


def parts_of(judger: Any, timeout_s: float, path: str) -> dict[str, JudgeDesk]:
    """Make the desks of the judgers that this one asks; none where it asks nobody.

    Args:
        judger: it.
        timeout_s: that of its own, for those that have none.
        path: its dotted path.

    Raises:
        ConfigError: with every problem of theirs.
    """
    problems: list[Problem] = []
    desks: dict[str, JudgeDesk] = {}
    others: Mapping[str, Any] = getattr(judger, "others", None) or {}
    for name, settings in others.items():
        where = f"{path}.{name}"
        try:
            desks[name] = make_desk(_read(settings, timeout_s, where), where)
            if desks[name].by_group:
                problems.append(Problem(where, "judges whole groups, and cannot be asked for one sample"))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return desks


def _read(settings: Any, timeout_s: float, where: str) -> JudgerConfig:
    """Read the settings of a part; its timeout is that of the whole where it has none."""
    if not isinstance(settings, Mapping):
        raise ConfigError.at(where, f"expected a mapping, as in a task's judger, not {settings!r:.100}")
    try:
        return JudgerConfig.model_validate({"timeout_s": timeout_s, **settings})
    except ValidationError as error:
        raise ConfigError(
            Problem(f"{where}.{problem.path}" if problem.path else where, problem.message)
            for problem in problems_of(error)
        ) from error
