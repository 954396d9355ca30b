"""An update that failed at some workers, taken back at the others.

| what a worker has | how it gets back to the version before |
|---|---|
| an update that was staged and closed, and whose engine kept what it swapped out | swaps it in again |
| anything else, where the version before came from `disk` | loads that path again |
| anything else | it cannot: it is out, and named |

Invariant: a worker counts as back only by its own word, and with no prefix cached under the weights it had meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.fleet import Fleet, Source
from rollout_svc.weights.staging import Staged, Staging
from rollout_svc.workers.worker import Worker

__all__ = ["Before", "TakingBack"]


class Before(NamedTuple):
    """What the fleet had before an update.

    Attributes:
        version: trainer steps whose weights it had.
        source: where they came from; None: they were there from the start.
    """

    version: int
    source: Source | None


class TakingBack:
    """Brings one worker at a time back; see the module's table."""

    def __init__(self, fleet: Fleet, staging: Staging) -> None:
        self._fleet = fleet
        self._staging = staging

    async def bring(self, worker: Worker, before: Before, staged: Staged | None) -> None:
        """Bring a worker back; raises WorkerFailure where it cannot be, or does not say that it is.

        Args:
            worker: whom.
            before: what it shall have.
            staged: what it was handed, where it has closed that and kept what it had.
        """
        if staged is not None:
            try:
                await self._staging.revert(worker, staged, before.version)
            except WorkerFailure:
                await self._load(worker, before)
            else:
                await self._fleet.confirm(worker, before.version)
                await self._fleet.drop_caches(worker, before.version)
        else:
            await self._load(worker, before)
        if worker.version != before.version:
            raise WorkerFailure("odd_version", f"it reports {worker.version}, not {before.version}")

    async def _load(self, worker: Worker, before: Before) -> None:
        if before.source is None or before.source.path is None:
            came = "were there from the start" if before.source is None else f"came by {before.source.kind}"
            raise WorkerFailure("cannot", f"the weights of version {before.version} {came}")
        await self._fleet.load(worker, before.source.path, before.version)
