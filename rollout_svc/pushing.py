"""Prompts that a caller pushes into a task.

Invariant: what was accepted is durable before it is said, where there is a journal, and the producer knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollout_svc.assembly import Parts
from rollout_svc.errors import Conflict, NotFound
from rollout_svc.producer.sources import PromptSource, PushSource

__all__ = ["push"]

_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message


async def push(parts: Parts, sources: Mapping[str, PromptSource], task: str, prompts: list[Any]) -> dict[str, int]:
    """Add prompts to a task that is fed by push; returns how many were new.

    Raises:
        NotFound: there is no such task.
        Conflict: its prompts come from elsewhere.
        BadRequest: a line is no prompt; none was added.
    """
    source = sources.get(task)
    if source is None:
        raise NotFound(f"no task {task[:_ECHO_CHARS]!r}", detail={"tasks": sorted(sources)})
    if not isinstance(source, PushSource):
        raise Conflict(f"task {task!r} does not take prompts: its prompts.push is not true")
    fresh = source.push(prompts)
    parts.storage.pushed(task, {line.prompt_id: line.content for line in fresh})
    parts.producer.wake()
    await parts.storage.flush()
    return {"accepted": len(fresh)}
