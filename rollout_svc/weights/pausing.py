"""Who asks for a pause, and for its end.

Invariants:

- What means nothing is refused before anything is stopped.
- The gate opens in the step that found no pause and no update under way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from rollout_svc.config import PauseConfig
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, Lane
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.request import read_mode
from rollout_svc.weights.calls import WeightCalls
from rollout_svc.workers.pool import WorkerPool

__all__ = ["PauseCalls"]


class PauseCalls:
    """The calls that stop the stage, and start it again; see the module's invariants.

    Attributes:
        resuming: callers that wait for it to go on.
    """

    def __init__(
        self,
        pauses: PauseController,
        pool: WorkerPool,
        config: PauseConfig,
        weights: WeightCalls,
        check: Callable[[], None],
    ) -> None:
        """Make the calls.

        Args:
            pauses: who climbs.
            pool: the engines.
            config: what holds where a caller does not say.
            weights: who moves weights meanwhile.
            check: raises where the service does not run, or has failed.
        """
        self.resuming = 0
        self._pauses = pauses
        self._pool = pool
        self._config = config
        self._weights = weights
        self._check = check

    async def pause(
        self, *, mode: str | None, deadline_s: float | None, lanes: tuple[Lane, ...], if_ticket: int | None, kv: str
    ) -> PauseReport:
        """Stop the stage; see `RolloutService.pause`."""
        deadline = self._config.deadline_s if deadline_s is None else deadline_s
        if not (math.isfinite(deadline) and deadline > 0):
            raise BadRequest.at("deadline_s", "expected a finite number greater than 0")
        if not lanes or not set(lanes) <= set(LANES):
            raise BadRequest.at("lanes", f"expected some of {', '.join(LANES)}, not {list(lanes)}")
        how, cache = read_mode(mode or self._config.mode, kv, lanes, self._pool.workers.values())
        return await self._pauses.pause(mode=how, deadline_s=deadline, lanes=lanes, if_ticket=if_ticket, cache=cache)

    async def resume(self, ticket: int | None, weight_version: int | None) -> None:
        """Open the gate; see `RolloutService.resume`."""
        self._pauses.check_resume(ticket)
        self.resuming += 1
        try:
            while True:
                await self._pauses.report()
                if self._weights.updating is not None:
                    await asyncio.wait({self._weights.updating})
                    continue
                if weight_version is not None:
                    await self._weights.assert_version(weight_version)
                # What was awaited may have changed everything: looked at again in the step that opens the gate.
                self._check()
                if self._weights.updating is None and not self._pauses.climbing:
                    self._pauses.resume(ticket)
                    return
        finally:
            self.resuming -= 1
