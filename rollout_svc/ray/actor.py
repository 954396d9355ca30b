"""The service in an actor: every call is passed on to the loop that the service runs in.

Invariants:

- The service has a thread and an event loop of its own: what Ray serialises or waits for holds up no engine.
- Control calls have a concurrency group of their own: they never queue behind batches that are waited for.
- What is given is checked by the models of the control API, so that a mistake is the same error either way.
- An actor whose service could not be made is there all the same, and says why at every call, and when it tries again:
  an error in a constructor would reach nobody but as text.
- An actor that was started again goes on from the journal, as any process of the service does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import orjson

from rollout_svc.config import Config
from rollout_svc.errors import BadRequest
from rollout_svc.evaluations.evaluation import encoded_records
from rollout_svc.ray.batch import Contents, Encoded, Packed, contents, pack
from rollout_svc.ray.making import Making
from rollout_svc.ray.sharded import coordinator_of, hosted_shards, take_shards
from rollout_svc.ray.thread import ServiceThread
from rollout_svc.rpc import arguments, bodies
from rollout_svc.rpc.reading import checked
from rollout_svc.service import RolloutService
from rollout_svc.tensors.ray_store import touched

__all__ = ["BATCHES", "GROUPS", "WAITING", "ServiceActor"]

T = TypeVar("T")
Json = dict[str, Any]

GROUPS: Final = {"control": 256, "batches": 512, "waiting": 256}
"""Calls of each group that are answered at once; more wait in the actor."""
BATCHES: Final = ("take_batch", "evaluate")
WAITING: Final = ("ready",)
"""Calls that wait for engines to load; all that are in neither are control calls."""


class ServiceActor:
    """The calls of `RolloutClient`, as methods of an actor; each returns the record that the control API answers."""

    def __init__(self, config: Config) -> None:
        """Start the service; until it is made every call raises what keeps it from that."""

        def make() -> ServiceThread:
            address = _node_address()
            host = partial(hosted_shards, level="info", address=address) if config.producer.shards > 1 else None
            return ServiceThread(config, address, host)

        self._making = Making(make)

    @property
    def _thread(self) -> ServiceThread:
        return self._making.get()

    @property
    def _service(self) -> RolloutService:
        return self._thread.service

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return await self._thread.ask(call)

    async def _ask(self, call: Callable[[RolloutService], T]) -> T:
        """Make a call that does not wait, in the service's loop."""
        return await self._run(self._thread.calling(call))

    # -- the actor itself ------------------------------------------------------------------------------------

    async def made(self) -> str:
        """Say where the control API is served; engines may still be loading. Raises what the start failed with."""
        return self._thread.url

    async def ready(self) -> str:
        """Wait until every configured engine has answered; returns where the control API is served."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.ready))

    async def stop(self) -> None:
        """Drain under the pause deadline, and end everything; idempotent."""
        if (made := self._making.stop()) is not None:
            await asyncio.shield(asyncio.wrap_future(made.stop()))

    async def stops_within(self) -> float:
        """Say how many seconds `stop` may take."""
        made = self._making.made
        return 0.0 if made is None else made.stop_s

    async def touched(self) -> dict[str, int]:
        """Bytes of heavy tensors that each thread of the actor has copied or looked at, by its name."""
        return touched()

    # -- what is going on ------------------------------------------------------------------------------------

    async def status(self) -> Json:
        """See `RolloutService.status`."""
        return await self._ask(lambda service: service.status())

    async def stuck(self, older_than_s: float | None = None) -> Json:
        """See `RolloutService.stuck`."""
        query = checked(arguments.given(older_than_s=older_than_s), bodies.Stuck)
        return await self._ask(lambda service: service.stuck(query.older_than_s))

    async def memory(self) -> Json:
        """See `RolloutService.memory`."""
        return await self._run(self._service.memory())

    async def pause(
        self,
        *,
        mode: str | None = None,
        deadline_s: float | None = None,
        lanes: Sequence[str] | None = None,
        if_ticket: int | None = None,
        kv: str | None = None,
        offload: Sequence[str] | None = None,
    ) -> Json:
        """See `RolloutService.pause`; returns the report as a record."""
        given = arguments.given(
            mode=mode, deadline_s=deadline_s, lanes=lanes, if_ticket=if_ticket, kv=kv, offload=offload
        )
        report = await self._run(self._service.pause(**checked(given, bodies.Pause).arguments()))
        record: Json = report.as_json()
        return record

    async def resume(self, ticket: int | None = None, *, weight_version: int | None = None) -> Json:
        """See `RolloutService.resume`."""
        body = checked(arguments.given(ticket=ticket, weight_version=weight_version), bodies.Resume)
        return await self._run(self._service.resume(ticket=body.ticket, weight_version=body.weight_version))

    # -- batches and prompts ---------------------------------------------------------------------------------

    async def take_batch(
        self,
        step: int,
        groups: int,
        timeout_s: float = 60.0,
        ack: Sequence[str] = (),
        *,
        tensors: bool = False,
        client: str | None = None,
    ) -> Packed:
        """See `RolloutService.take_batch`; heavy tensors travel as references."""
        body = checked(arguments.batch(step, groups, timeout_s, ack), bodies.Batch)
        if (coordinator := coordinator_of(self._service)) is not None:
            taken = await self._run(take_shards(coordinator, body, tensors=tensors))
        else:
            taken = await self._run(self._take(body, tensors=tensors))
        return await asyncio.to_thread(pack, taken, client, body.ack)

    async def _take(self, body: bodies.Batch, *, tensors: bool) -> Contents:
        batch = await self._service.lease_batch(body.step, body.groups, body.timeout_s, body.ack)
        lease = self._service.parts.buffer.leased_at(body.step)
        left_s = 0.0 if lease is None else lease.expires_at - asyncio.get_running_loop().time()
        return contents(batch, left_s, tensors=tensors)

    async def ack(self, batch_id: str) -> Json:
        """See `RolloutService.ack`."""
        return await self._run(self._service.ack(_name("batch_id", batch_id)))

    async def put_prompts(self, task: str, prompts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """See `RolloutService.put_prompts`."""
        body = checked(arguments.prompts(task, prompts), bodies.Prompts)
        return await self._run(self._service.put_prompts(body.task, body.prompts))

    async def checkpoint(self, path: str, step: int, ack: Sequence[str] = ()) -> Json:
        """See `RolloutService.checkpoint`; the file is on the actor's node."""
        body = checked(arguments.checkpoint(path, step, ack), bodies.Checkpoint)
        return await self._run(self._service.checkpoint(body.path, body.step, body.ack))

    async def evaluate(
        self,
        task: str,
        prompts: Sequence[Mapping[str, Any]],
        *,
        sampling: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout_s: float = 600.0,
    ) -> Encoded:
        """See `RolloutService.evaluate`."""
        given = arguments.evaluation(task, prompts, sampling=sampling, version=version, timeout_s=timeout_s)
        return Encoded(await self._run(self._evaluate(checked(given, bodies.Evaluation))))

    async def _evaluate(self, body: bodies.Evaluation) -> list[bytes]:
        if (coordinator := coordinator_of(self._service)) is not None:
            return [orjson.dumps(await coordinator.evaluate(**body.arguments()))]
        return await encoded_records(await self._service.run_evaluation(**body.arguments()))

    # -- weights, concurrency, workers -----------------------------------------------------------------------

    async def update_weights(
        self, version: int, source: Mapping[str, Any], *, pause: Mapping[str, Any] | None = None, force: bool = False
    ) -> Json:
        """See `RolloutService.update_weights`."""
        body = checked(arguments.weights(version, source, pause=pause, force=force), bodies.Weights)
        return await self._run(self._service.update_weights(**body.arguments()))

    async def concurrency(self) -> Json:
        """See `RolloutService.concurrency`."""
        return await self._ask(lambda service: service.concurrency())

    async def set_concurrency(
        self, *, trainer: Mapping[str, Any] | None = None, limits: Mapping[str, int] | None = None
    ) -> Json:
        """See `RolloutService.set_concurrency`."""
        body = checked(arguments.given(trainer=trainer, limits=limits), bodies.Concurrency)
        return await self._run(self._service.set_concurrency(**body.arguments()))

    async def workers(self) -> list[Json]:
        """See `RolloutService.workers`."""
        return await self._ask(lambda service: service.workers())

    async def add_worker(self, url: str | Mapping[str, Any] | None = None, **settings: Any) -> Json:
        """See `RolloutService.add_worker`; the keys of a worker in the configuration, or all of it at once."""
        return await self._run(self._service.add_worker(checked(arguments.worker(url, settings), bodies.Worker)))

    async def remove_worker(self, worker_id: str) -> Json:
        """See `RolloutService.remove_worker`."""
        return await self._run(self._service.remove_worker(_name("worker_id", worker_id)))


def _name(path: str, given: Any) -> str:
    """What the control API has in an address, where everything is text."""
    if not isinstance(given, str):
        raise BadRequest.at(path, "expected a string")
    return given


def _node_address() -> str:
    """Address of the node that this actor is on."""
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    util: Any = ray.util
    address: str = util.get_node_ip_address()
    return address
