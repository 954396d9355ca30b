"""What an evaluation is asked for, checked before anything is admitted.

Invariants:

- What is wrong is said with the path of its field, and nothing has happened.
- The task's settings are copied, never changed: what an evaluation lays over them ends with it.
- Routed experts are never asked for, whatever the task asks for in training.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from rollout_svc.config import SamplingConfig
from rollout_svc.configfile import problems_of
from rollout_svc.engines import Dialect
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.errors import BadRequest, NotFound, Problem
from rollout_svc.producer.lines import PromptLine, check_line, read_line
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.tokens import Refused

__all__ = ["MAX_PROMPTS", "Request", "read_request"]

MAX_PROMPTS: Final = 20_000
"""Prompts of one evaluation: more than the usual sets have; all answers are held until the last is there."""
_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message
_SLICE: Final = 256  # lines checked between two turns of the loop: a few milliseconds
_EXPERTS: Final = "return_routed_experts"  # the request key of SGLang and LMDeploy; vLLM has a switch of the engine's


@dataclass(frozen=True, slots=True)
class Request:
    """An evaluation that can be carried out.

    Attributes:
        runtime: the task's agent and judger, with the sampling of this evaluation.
        lines: its prompts, at least one.
        version: the weight version it is for; None: the fleet's when it begins.
        timeout_s: seconds, from 0.
    """

    runtime: TaskRuntime
    lines: tuple[PromptLine, ...]
    version: int | None
    timeout_s: float


async def read_request(
    task: str,
    prompts: Sequence[Any],
    *,
    sampling: Mapping[str, Any] | None,
    version: int | None,
    timeout_s: float,
    runtimes: Mapping[str, TaskRuntime],
    refused: Refused,
    dialects: Iterable[Dialect],
) -> Request:
    """Check what was asked for.

    Args:
        task: whose agent, judger and sampling.
        prompts: prompt lines, as a file has them; 1 to `MAX_PROMPTS`.
        sampling: keys laid over the task's sampling.
        version: the weight version it is for.
        timeout_s: seconds for all of it.
        runtimes: the tasks there are.
        refused: kinds of content that cannot become tokens here.
        dialects: those of the fleet, for what a router would drop without a word.

    Raises:
        NotFound: there is no such task.
        BadRequest: with the path of what is wrong.
    """
    runtime = runtimes.get(task)
    if runtime is None:
        raise NotFound(f"no task {task[:_ECHO_CHARS]!r}", detail={"tasks": sorted(runtimes)})
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise BadRequest.at("timeout_s", "expected a finite number, 0 or greater")
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise BadRequest.at("prompts", f"expected 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    drawn = _laid_over(runtime.sampling, sampling or {})
    for dialect in dialects:
        if isinstance(dialect, RoutedSGLang) and (said := dialect.refuses(drawn)) is not None:
            path, _, why = said.partition(":")
            raise BadRequest.at(f"sampling.{path}", why.strip())
    lines = []
    for index, line in enumerate(prompts):
        lines.append(_line(line, index, refused))
        if index % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    # Its tokens are of one version, whatever is cut: to make them again would cost and change nothing.
    return Request(replace(runtime, sampling=drawn, partial=True), tuple(lines), version, timeout_s)


def _laid_over(base: SamplingConfig, given: Mapping[str, Any]) -> SamplingConfig:
    """Lay keys over a task's sampling, in a copy of it."""
    task = base.model_dump()
    task["extra"] = {key: value for key, value in task["extra"].items() if key != _EXPERTS}
    try:
        drawn = SamplingConfig.model_validate(task | dict(given))
    except ValidationError as error:
        problems = problems_of(error, "sampling")
        raise _refuse(problems) from error
    if _EXPERTS in drawn.extra:
        raise BadRequest.at(f"sampling.extra.{_EXPERTS}", "an evaluation has no routed experts")
    return drawn.model_copy(update={"return_routed_experts": False}, deep=True)


def _line(line: Any, index: int, refused: Refused) -> PromptLine:
    problem = check_line(line, refused)
    if problem is not None:
        raise BadRequest.at(f"prompts.{index}.{problem.path}".rstrip("."), problem.message)
    if _EXPERTS in (line.get("engine_extra") or {}):
        raise BadRequest.at(f"prompts.{index}.engine_extra.{_EXPERTS}", "an evaluation has no routed experts")
    return read_line(line, refused, f"prompts.{index}")


def _refuse(problems: Sequence[Problem]) -> BadRequest:
    listed = [{"path": problem.path, "message": problem.message} for problem in problems]
    return BadRequest("; ".join(str(problem) for problem in problems), detail=listed)
