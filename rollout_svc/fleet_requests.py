"""What a caller asks of the fleet, refused with the path of what is wrong.

Invariant: where one of these raises, the plan and the fleet are as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollout_svc.concurrency import Concurrency
from rollout_svc.config import WorkerConfig
from rollout_svc.configfile import problems_of
from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.launching import newcomer_problems

__all__ = ["add_one", "refuse_newcomer", "set_plan"]


def set_plan(fleet: Concurrency, trainer: Mapping[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """Follow other numbers; returns the plan in force.

    Raises:
        BadRequest: a value is out of bounds, or the plan is impossible.
    """
    try:
        return fleet.set(trainer, limits).as_json()
    except ValidationError as error:
        raise BadRequest.of(problems_of(error, "trainer")) from error
    except ConfigError as error:
        raise BadRequest.of(error.problems) from error


async def refuse_newcomer(config: WorkerConfig, *, on_cluster: bool) -> None:
    """Raise BadRequest where an engine that is to be launched cannot be, here or on the cluster."""
    if config.launch is not None:
        problems = await asyncio.to_thread(newcomer_problems, config.launch, "launch", on_cluster=on_cluster)
        if problems:
            raise BadRequest.of(problems)


def add_one(fleet: Concurrency, config: WorkerConfig) -> str:
    """Add an engine; returns its id.

    Raises:
        BadRequest: the larger fleet's plan is impossible on this machine.
        Conflict: there is a worker at that url, or no port for another.
    """
    try:
        return fleet.add(config)
    except ConfigError as error:
        raise BadRequest.of(error.problems) from error
