"""What each call of the control API does: a body that passed in, a record out.

Invariants:

- A call gets what its route names (`routes`), in this order: the body, the query, whether another media type is wanted,
  the names in its path.
- It answers with a record, which leaves as JSON with the status of its route, or with a response of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from rollout_svc.configfile import REFERENCE
from rollout_svc.errors import BadRequest, Conflict, NotFound, RolloutError, ServiceError, SpentHandle
from rollout_svc.evaluations.evaluation import encoded_records
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.batch import head, pack, rows
from rollout_svc.packing.experts import pack_experts
from rollout_svc.packing.parts import InParts, LendsParts, unreadable
from rollout_svc.rpc import bodies
from rollout_svc.rpc.envelope import json_answer
from rollout_svc.service import RolloutService

__all__ = ["Render", "Site", "one_service"]

_PIECE_BYTES: Final = 2**18  # of a large body, handed to the connection at a time

Render = Callable[[], tuple[bytes, str]]
"""Gives the body and the content type of `/metrics`."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the calls work on: a service, and what is told of it beside the API."""

    service: RolloutService
    metrics: Render | None
    document: bytes


async def healthz(site: Site) -> web.Response:
    """Whether the process works at all."""
    state = site.service.state
    return json_answer({"state": state}, 500 if state == "failed" else 200)


async def readyz(site: Site) -> web.Response:
    """Whether it takes work: 503 until the engines are there, and at the end."""
    state = site.service.state
    return json_answer({"state": state}, 503 if state in ("starting", "stopping", "failed") else 200)


async def metrics(site: Site) -> web.Response:
    """Figures for Prometheus."""
    if site.metrics is None:
        raise web.HTTPNotFound
    body, content_type = site.metrics()
    return web.Response(body=body, headers={"Content-Type": content_type})


async def document(site: Site) -> web.Response:
    """This description of the API."""
    return web.Response(body=site.document, content_type="application/json")


async def _said(answer: Any) -> Any:
    """What a call that only looks says; over shards it has to be waited for."""
    return await answer if inspect.isawaitable(answer) else answer


def one_service(site: Site) -> RolloutService:
    """The service, for what several shards do not have between them; raises Conflict."""
    service: object = site.service
    if not isinstance(service, RolloutService):
        raise Conflict("this is not to be had of several shards", type="sharded")
    return service


async def status(site: Site) -> Any:
    """What the service is doing."""
    return await _said(site.service.status())


async def stuck(site: Site, query: bodies.Stuck) -> Any:
    """Who has been under way for longer than that, and where."""
    return await _said(site.service.stuck(query.older_than_s))


async def memory(site: Site) -> Any:
    """What every process has, what grows with the trainer's steps, and what is to blame."""
    return await site.service.memory()


async def pause(site: Site, body: bodies.Pause) -> Any:
    """Stop the stage; answers by the deadline, with a report."""
    return (await site.service.pause(**body.arguments())).as_json()


async def resume(site: Site, body: bodies.Resume) -> Any:
    """Let the stage go on; waits for the report of a pause under way."""
    return await site.service.resume(ticket=body.ticket, weight_version=body.weight_version)


async def take_batch(site: Site, body: bodies.Batch, tensors: bool) -> web.Response:
    """Lease a batch; the same step again gives the same one while it is leased."""
    batch = await site.service.lease_batch(body.step, body.groups, body.timeout_s, body.ack)
    leased: object = batch
    if isinstance(leased, InParts):
        return await _from_parts(leased, tensors=tensors)
    if tensors:
        taken, told = rows(batch), head(batch)
        try:
            return _in_pieces(await asyncio.to_thread(pack, taken, told), MEDIA_TYPE)
        except SpentHandle as error:
            message = f"batch {batch.batch_id} was given up before it was sent: {error}"
            raise Conflict(message, type="lease_expired", detail={"batch_id": batch.batch_id}) from error
    parts: list[bytes] = []
    for part in batch.encoded():
        parts.append(part)
        await asyncio.sleep(0)  # a large batch must not hold the loop
    return _in_pieces(parts, "application/json")


async def _from_parts(batch: InParts, *, tensors: bool) -> web.Response:
    """Answer with a batch whose groups lie in several shards."""
    try:
        if not tensors:
            return _in_pieces([piece async for piece in batch.encoded()], "application/json")
        taken, told = await batch.to_pack()
        return _in_pieces(await asyncio.to_thread(pack, taken, told), MEDIA_TYPE)
    except ServiceError:
        raise
    except RolloutError as lost:
        raise unreadable(batch.batch_id, lost) from lost


def _in_pieces(parts: Sequence[bytes | memoryview], media: str) -> web.Response:
    """Answer with a large body: joined, or written at once, it would hold the loop."""

    async def pieces() -> AsyncIterator[memoryview]:
        for whole in parts:
            part = memoryview(whole)
            for start in range(0, len(part), _PIECE_BYTES):
                yield part[start : start + _PIECE_BYTES]
                await asyncio.sleep(0)

    headers = {"Content-Length": str(sum(map(len, parts))), "Content-Type": media}
    return web.Response(body=pieces(), headers=headers)


async def tensors(site: Site, sample_id: str) -> web.Response:
    """The routed experts of one sample that is lent, as safetensors."""
    service: object = site.service
    if isinstance(service, LendsParts):
        handle = await service.experts_of(sample_id)
    else:
        handle = site.service.parts.batches.experts_of(sample_id)
    try:
        return _in_pieces(await asyncio.to_thread(pack_experts, handle), MEDIA_TYPE)
    except SpentHandle as error:
        raise NotFound(str(error)) from error


async def ack(site: Site, _body: bodies.Ack, batch_id: str) -> Any:
    """Consume a leased batch for good."""
    return await site.service.ack(batch_id)


async def put_prompts(site: Site, body: bodies.Prompts) -> Any:
    """Add prompts to a task that is fed by push; the same id is accepted once."""
    return await site.service.put_prompts(body.task, body.prompts)


async def checkpoint(site: Site, body: bodies.Checkpoint) -> Any:
    """Write a snapshot of everything that must survive; works paused and running."""
    return await site.service.checkpoint(body.path, body.step, body.ack)


async def update_weights(site: Site, body: bodies.Weights) -> Any:
    """Bring every engine to a version; needs a drained or frozen stage, or `pause`."""
    return await site.service.update_weights(**body.arguments())


async def evaluate(site: Site, body: bodies.Evaluation) -> web.Response:
    """Have prompts answered and judged in lane `eval`, under one weight version; a caller that leaves ends it."""
    service: object = site.service
    if not isinstance(service, RolloutService):
        return json_answer(await site.service.evaluate(**body.arguments()))
    groups = await service.run_evaluation(**body.arguments())
    return _in_pieces(await encoded_records(groups), "application/json")


async def concurrency(site: Site) -> Any:
    """The concurrency plan in force."""
    return await _said(site.service.concurrency())


async def set_concurrency(site: Site, body: bodies.Concurrency) -> Any:
    """Derive the plan from the trainer's numbers (keys not given stay), or cap single workers."""
    return await site.service.set_concurrency(**body.arguments())


async def workers(site: Site) -> Any:
    """The fleet."""
    return {"workers": await _said(site.service.workers())}


async def add_worker(site: Site, body: bodies.Worker) -> Any:
    """Add an engine; it gets traffic once it answers and has the current weights."""
    if body.launch is not None and not site.service.config.service.token:
        # Whoever reaches the port could have us run anything, a page in a browser on this machine included.
        raise BadRequest.at("launch", "starting a process over HTTP needs a service with a service.token")
    _refuse_references(body)
    return await site.service.add_worker(body)


def _refuse_references(body: bodies.Worker) -> None:
    """Refuse `${NAME}`: a configuration file may name the service's variables, whoever reaches its port may not."""
    values = {"api_key": body.api_key, "admin_key": body.admin_key}
    if body.launch is not None:
        values |= {f"launch.env.{name}": value for name, value in body.launch.env.items()}
    for path, value in values.items():
        if value is not None and (found := REFERENCE.search(value)):
            raise BadRequest.at(path, f"{found[0]} stands for a variable in a configuration file only: send its value")


async def remove_worker(site: Site, worker_id: str) -> Any:
    """Take an engine out of the fleet; what it runs may finish first."""
    return await site.service.remove_worker(worker_id)
