"""A sample that breaks every worker it meets: pure.

Invariant: worker failures cost a sample nothing, but for the third one on workers that answered others since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.sample import Sample
from rollout_svc.workers.worker import Worker

__all__ = ["refuse_poison"]

_FAILURES: Final = 3  # worker failures of one sample, on workers that answered others since


def refuse_poison(workers: Mapping[str, Worker], sample: Sample, failure: WorkerFailure) -> None:
    """Fail a sample that kept failing on workers which answered others meanwhile.

    Raises:
        SampleFailure: `poison`.
    """
    proved = sum(
        worker_id in workers and workers[worker_id].answered > answered
        for worker_id, answered in sample.worker_failures
    )
    if proved >= _FAILURES:
        sample.worker_failures.clear()
        raise SampleFailure("poison", f"{proved} workers failed it and answered others; last: {failure}")
