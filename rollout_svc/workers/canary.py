"""One token, generated and aborted: whether an engine works at all.

Invariants:

- It asks each engine of a worker itself, one after the other, within one bound; what it began is aborted in any case.
- It asks nobody while a pause climbs, and no engine that sleeps. One under way then is seen (`Worker.trial`): until it
  is answered, or aborted, nobody can say that the engine runs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import GenerateRequest, Transport
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker

__all__ = ["Canary"]

_BOUND_S: Final = 10.0  # seconds a quarantined engine has to make one token
_SAMPLING: Final = SamplingConfig(max_tokens=1)


class Canary:
    """See the module's invariants."""

    def __init__(
        self, *, pool: WorkerPool, transport: Transport, may: Callable[[], bool], new_id: Callable[[], str]
    ) -> None:
        """Make one.

        Args:
            pool: who aborts.
            transport: carries its calls.
            may: whether anything may be asked now.
            new_id: makes wire ids.
        """
        self._pool = pool
        self._transport = transport
        self._may = may
        self._new_id = new_id

    async def sing(self, worker: Worker) -> bool:
        """Generate one token at each engine itself and abort it: do they work at all?"""
        if worker.asleep is not None:
            return False  # what is sent there waits, or ends it
        requests = [GenerateRequest(self._new_id(), [0], 1, _SAMPLING) for _ in worker.engines]
        worker.trial = asyncio.Event()
        try:
            async with asyncio.timeout(_BOUND_S):
                for engine, request in zip(worker.engines, requests, strict=True):
                    if not self._may():
                        return False
                    reply = await self._transport.data(engine, worker.dialect.generate(request))
                    worker.dialect.parse_generate(reply)
        except (WorkerFailure, SampleFailure, TimeoutError):
            return False
        finally:
            try:
                await self._pool.abort(worker, [request.request_id for request in requests])
            finally:
                worker.trial.set()
                worker.trial = None
        return True
