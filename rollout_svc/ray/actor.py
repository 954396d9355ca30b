"""The service in an actor: every call is passed on to the loop that the service runs in.

Invariants:

- The service has a thread and an event loop of its own: what Ray serialises or waits for holds up no engine.
- Control calls have a concurrency group of their own: they never queue behind batches that are waited for.
- An actor that was started again goes on from the journal, as any process of the service does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from rollout_svc.config import Config, WorkerConfig
from rollout_svc.ray.batch import Packed, pack
from rollout_svc.ray.thread import ServiceThread

__all__ = ["GROUPS", "ServiceActor"]

T = TypeVar("T")

GROUPS: Final = {"control": 64, "batches": 64}
"""Calls of each group that are answered at once; more wait in the actor."""


class ServiceActor:
    """The calls of `RolloutService`, as methods of an actor; each returns the record that the control API answers."""

    def __init__(self, config: Config) -> None:
        """Start the service; raises ConfigError, and the actor is never there."""
        self._thread = ServiceThread(config)

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._thread.run(call))

    async def ready(self) -> str:
        """Wait until every configured engine has answered; returns where the control API is served."""
        return await asyncio.wrap_future(self._thread.ready)

    async def status(self) -> dict[str, Any]:
        """See `RolloutService.status`."""
        return await self._run(self._thread.calling(lambda service: service.status()))

    async def memory(self) -> dict[str, Any]:
        """See `RolloutService.memory`."""
        return await self._run(self._thread.service.memory())

    async def pause(self, **asked: Any) -> dict[str, Any]:
        """See `RolloutService.pause`; returns the report as a record."""
        report = await self._run(self._thread.service.pause(**asked))
        record: dict[str, Any] = report.as_json()
        return record

    async def resume(self, ticket: int | None = None, weight_version: int | None = None) -> dict[str, Any]:
        """See `RolloutService.resume`."""
        return await self._run(self._thread.service.resume(ticket=ticket, weight_version=weight_version))

    async def take_batch(
        self, step: int, groups: int, timeout_s: float, ack: Sequence[str] = (), *, client: str | None = None
    ) -> Packed:
        """See `RolloutService.take_batch`; heavy tensors travel as references."""
        batch = await self._run(self._thread.service.lease_batch(step, groups, timeout_s, ack))
        return pack(batch, client)

    async def ack(self, batch_id: str) -> dict[str, Any]:
        """See `RolloutService.ack`."""
        return await self._run(self._thread.service.ack(batch_id))

    async def put_prompts(self, task: str, prompts: list[Any]) -> dict[str, int]:
        """See `RolloutService.put_prompts`."""
        return await self._run(self._thread.service.put_prompts(task, prompts))

    async def evaluate(self, task: str, prompts: Sequence[Any], **how: Any) -> dict[str, Any]:
        """See `RolloutService.evaluate`."""
        return await self._run(self._thread.service.evaluate(task, prompts, **how))

    async def update_weights(
        self, version: int, source: Mapping[str, Any], pause: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> dict[str, Any]:
        """See `RolloutService.update_weights`."""
        return await self._run(self._thread.service.update_weights(version, source, pause, force=force))

    async def set_concurrency(
        self, trainer: Mapping[str, Any] | None = None, limits: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """See `RolloutService.set_concurrency`."""
        return await self._run(self._thread.service.set_concurrency(trainer, limits))

    async def workers(self) -> list[dict[str, Any]]:
        """See `RolloutService.workers`."""
        return await self._run(self._thread.calling(lambda service: service.workers()))

    async def add_worker(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `RolloutService.add_worker`."""
        return await self._run(self._thread.service.add_worker(WorkerConfig.model_validate(dict(config))))

    async def remove_worker(self, worker_id: str) -> dict[str, Any]:
        """See `RolloutService.remove_worker`."""
        return await self._run(self._thread.service.remove_worker(worker_id))

    async def stop(self) -> None:
        """Drain under the pause deadline, and end everything."""
        await asyncio.wrap_future(self._thread.stop())
