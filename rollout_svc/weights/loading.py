"""To whom weights may move, and to whom they are on their way.

Invariant: what is frozen at an engine does not go on while weights are on their way there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rollout_svc.workers.worker import Worker

__all__ = ["loading", "still"]


@contextmanager
def loading(workers: Iterable[Worker]) -> Iterator[None]:
    """Weights are on their way to these, until the outermost of these ends."""
    held = [worker for worker in workers if not worker.loading]
    for worker in held:
        worker.loading = True
    try:
        yield
    finally:
        for worker in held:
            worker.loading = False


def still(worker: Worker) -> bool:
    """Whether nothing of ours can make a token there: it is idle or frozen."""
    return not worker.calls or worker.frozen
