"""Who is behind a worker's address: nobody any more, another process, or the one that was let in.

Pure: what a look found is passed in, and what is known of the worker follows from it.
"""

from __future__ import annotations

from typing import Final

from rollout_svc.engines import EngineInfo
from rollout_svc.errors import WorkerFailure
from rollout_svc.workers.merging import INCOMPLETE
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["PARTLY", "end_calls", "forget_process", "is_another", "is_lost"]

PARTLY: Final = frozenset({INCOMPLETE, "unfit"})
"""Kinds of failure where, of several engines behind a worker, not all are there or ours."""

_LOST_PINGS: Final = 3  # pings without an answer before a worker counts as dead


def is_lost(worker: Worker, failure: WorkerFailure) -> bool:
    """Count a probe that failed; whether it will not do: at once where a connection is refused."""
    refused = failure.kind in ("connection", *PARTLY) and not failure.accepted
    if worker.asleep is not None and not refused:
        return False  # it may be moving its memory
    worker.probe_failures = _LOST_PINGS if refused else worker.probe_failures + 1
    return worker.probe_failures >= _LOST_PINGS


def forget_process(worker: Worker, failure: WorkerFailure) -> None:
    """Where nobody listens its process has ended: who comes next is awake, and may be able to do what it was not."""
    if failure.kind == "connection" and not failure.accepted:
        worker.asleep, worker.weights_lost = None, False
        worker.withdrawn.clear()


def is_another(worker: Worker, info: EngineInfo) -> bool:
    """Whether another process is there than was let in, where nobody counted it yet: labels do not go back."""
    if not worker.labels:
        known = worker.process is not None and info.process is not None
        return known and info.process != worker.process and worker.state is not WorkerState.DEAD
    was_out = worker.state is WorkerState.RECOVERING
    was_out |= worker.quarantine is not None and worker.quarantine.kind == "residual"
    return was_out and worker.version is not None and info.weight_label is not None and info.weight_version is None


def end_calls(worker: Worker) -> None:
    """Let its requests go elsewhere."""
    for call in list(worker.calls.values()):
        call.cancel("worker_dead")
