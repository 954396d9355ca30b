"""Asking every engine of a configuration what it is, before anything is started.

Invariants:

- Nothing is started, and nothing changes at an engine: it is probed, and asked to abort a request that never was.
- All are asked at once, under one deadline: a worker that is silent, or slow, costs the others nothing.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final

from rollout_svc.assembly import make_worker, worker_ids
from rollout_svc.config import Config
from rollout_svc.engines import HttpTransport, Transport
from rollout_svc.errors import Problem, WorkerFailure
from rollout_svc.launching import taken_addresses
from rollout_svc.launching.cluster.survey import survey
from rollout_svc.plan import Plan
from rollout_svc.preflight import Answer, complaints, doubts
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["DEADLINE_S", "ask_engines", "preflight"]

DEADLINE_S: Final = 15.0
"""Seconds for all engines to answer: each is asked a handful of small questions."""
_CALL_S: Final = 3.0  # seconds for one of them; an engine under load answers late


class _Nobody:
    """Takes the place of a pool: these workers never change their state."""

    def state_changed(self, worker: Worker, before: WorkerState, after: WorkerState, reason: str) -> None:
        """Nobody listens."""


async def ask_engines(config: Config, transport: Transport, deadline_s: float = DEADLINE_S) -> dict[str, Answer]:
    """Ask every configured engine what it is.

    Args:
        config: the settings.
        transport: carries the calls; stays open.
        deadline_s: seconds for all of them together.

    Returns:
        By worker id, in the order of the configuration: what it is, or why it did not say. Workers that are launched
        are not there yet, and not spoken of.
    """
    asked = {
        worker_id: asyncio.ensure_future(_ask(make_worker(worker_id, settings, url, _Nobody(), Random()), transport))
        for worker_id, settings in zip(worker_ids(config), config.workers, strict=True)
        if (url := settings.url) is not None  # else there is nobody yet: it is launched with the service
    }
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=deadline_s)
    finally:
        for task in asked.values():
            task.cancel()  # which leaves those alone that are done
    silent = WorkerFailure("control_timeout", f"no answer to everything it was asked within {deadline_s:g} s")
    return {worker_id: task.result() if task.done() else silent for worker_id, task in asked.items()}


async def _ask(worker: Worker, transport: Transport) -> Answer:
    try:
        return await Control(transport).probe(worker, _CALL_S, try_key=True)
    except WorkerFailure as failure:
        return failure


async def preflight(config: Config, plan: Plan) -> dict[str, Any]:
    """Ask everybody, and make the record of it: `workers`, `cluster`, `plan`, `warnings`, `problems`, and if `ok`."""
    async with HttpTransport() as transport:
        answers = await ask_engines(config, transport)
    found = await survey(config)
    problems = [*complaints(config, answers), *await asyncio.to_thread(taken_addresses, config)]
    unsure = doubts(config, answers)
    if found is not None:
        problems += found.problems
        unsure = [*unsure, *found.doubts]
    return {
        "ok": not problems,
        "workers": [
            _record(worker_id, settings.url, plan.limit_of(worker_id), answers.get(worker_id))
            for worker_id, settings in zip(worker_ids(config), config.workers, strict=True)
        ],
        "cluster": None if found is None else found.record,
        "plan": plan.as_json(),
        "warnings": _lines(unsure),
        "problems": _lines(problems),
    }


def _record(worker_id: str, url: str | None, limit: int, answer: Answer | None) -> dict[str, Any]:
    record: dict[str, Any] = {"id": worker_id, "url": url, "limit": limit, "failure": None, "launched": answer is None}
    if answer is None:
        return record
    if isinstance(answer, WorkerFailure):
        return record | {"failure": str(answer)}
    return record | {
        "dialect": answer.dialect,
        "engine_version": answer.engine_version,
        "model": answer.model,
        "tokenizer": answer.tokenizer,
        "vocab_size": answer.vocab_size,
        "context": answer.context,
        "max_running": answer.max_running,
        "logprobs": answer.logprobs,
        "weight_label": answer.weight_label,
        "capabilities": sorted(answer.capabilities),
    }


def _lines(problems: list[Problem]) -> list[dict[str, str]]:
    return [{"path": problem.path, "message": problem.message} for problem in problems]
