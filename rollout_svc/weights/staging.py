"""Weights from a publisher: bucket by bucket to every engine, by the way the publisher has.

The publisher is asked (`POST /begin`, then `/next` until there is none, then `/end`); engines are told what it answers
for each of them, all at once, and the next bucket is asked for when each has the last.

| call | body | answer |
|---|---|---|
| `/begin` | `{version, engines: [{id, dialect, ranks}]}` | `{manifest?, bytes?, check_finite?, openings?: {id: {…}}}` |
| `/next` | `{}` | `{bodies: {id: {…}} or null, bytes, flatten_s}` |
| `/end` | `{whole}` | anything |

Invariants:

- No engine that stages computes with anything of an update before all of them have all of it.
- One that fails ends the update for all: what was staged is forgotten everywhere. An engine that loads as it comes is
  named as touched then, and has weights of no version.
- The publisher is told how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from rollout_svc.engines import Call, Endpoint, Transport
from rollout_svc.engines.parsing import control_body
from rollout_svc.engines.updates.protocol import Ask, EngineUpdate, Opening, Way
from rollout_svc.engines.updates.registry import make_update
from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker

__all__ = ["Publisher", "Staged", "Staging"]

_END_S: Final = 10.0  # seconds for taking leave of everybody

Visit = Callable[["_Recipient", Ask], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Publisher:
    """Who has the weights, and by which way they are had.

    Attributes:
        endpoint: where it is asked.
        way: how its buckets travel.
    """

    endpoint: Endpoint
    way: Way


@dataclass(frozen=True, slots=True)
class _Recipient:
    """One engine of a worker.

    Attributes:
        engine_id: its name to the publisher.
        update: its side of the update.
    """

    engine_id: str
    update: EngineUpdate


@dataclass(slots=True)
class Staged:
    """What came of handing weights over.

    Attributes:
        failed: why, by worker id; all of them where it was the publisher. Empty: all have all of it.
        recipients: by worker id, then by the engine's url.
    """

    failed: dict[str, str] = field(default_factory=dict)
    recipients: dict[str, dict[str, _Recipient]] = field(default_factory=dict)

    def touched(self, worker: Worker) -> bool:
        """Whether an engine of it has weights of no version, or may have."""
        return any(one.update.touched for one in self.recipients.get(worker.worker_id, {}).values())


class Staging:
    """Carries buckets from a publisher to engines; see the module's invariants."""

    def __init__(self, transport: Transport, control: Control, presence: Presence, timeout_s: float) -> None:
        self._transport = transport
        self._control = control
        self._presence = presence
        self._timeout_s = timeout_s

    async def stage(self, workers: Sequence[Worker], publisher: Publisher, version: int, phases: Phases) -> Staged:
        """Hand every worker what a publisher has; where that fails, have everybody told so."""
        lacking = {w.worker_id: _lack(w, publisher.way) for w in workers if publisher.way not in w.capabilities}
        if lacking:
            return Staged(lacking)
        staged = Staged(recipients={w.worker_id: dict(_recipients(w, publisher.way)) for w in workers})
        whole = False
        try:
            staged.failed = await self._stage(workers, publisher.endpoint, version, staged, phases)
            whole = not staged.failed
        except WorkerFailure as failure:
            staged.failed = {worker.worker_id: f"the publisher: {failure}" for worker in workers}
        finally:
            # Also where the caller was cancelled: an engine that waits for the rest would keep what it has staged.
            await asyncio.shield(self._leave(workers, publisher.endpoint, staged, whole=whole))
        return staged

    async def close(self, worker: Worker, staged: Staged, version: int) -> None:
        """Have a worker take what it was handed for its weights; raises WorkerFailure."""
        await self._visit(worker, staged, lambda one, ask: one.update.close(ask, version), self._timeout_s)

    async def _stage(
        self, workers: Sequence[Worker], publisher: Endpoint, version: int, staged: Staged, phases: Phases
    ) -> dict[str, str]:
        with phases.during("transfer"):
            answer = await self._ask(publisher, "/begin", {"version": version, "engines": _engines(workers, staged)})
        openings = _by_engine(answer.get("openings") or {})
        if type(answer.get("bytes")) is int and answer["bytes"] >= 0:
            phases.expect(answer["bytes"])
        manifest, check_finite = answer.get("manifest"), answer.get("check_finite") is True

        async def begin(one: _Recipient, ask: Ask) -> None:
            own = openings.get(one.engine_id, {})
            await one.update.open(ask, Opening(manifest, check_finite, version, own))

        with phases.during("load"):
            failed = await self._all(workers, staged, begin)
        while not failed:
            answer = await self._next(publisher, phases)
            if answer.get("bodies") is None:
                return {}
            bodies = _by_engine(answer["bodies"])

            async def load(one: _Recipient, ask: Ask, bodies: Mapping[str, Mapping[str, Any]] = bodies) -> None:
                if one.engine_id not in bodies:
                    raise WorkerFailure("bad_body", f"the publisher has nothing for {one.engine_id}")
                await one.update.load(ask, bodies[one.engine_id])

            with phases.during("load"):
                failed = await self._all(workers, staged, load)
            if not failed:
                phases.staged(int(answer.get("bytes", 0)))
        return failed

    async def _next(self, publisher: Endpoint, phases: Phases) -> dict[str, Any]:
        """The next bucket; it says itself for how long it was flattened."""
        asked = asyncio.get_running_loop().time()
        with phases.at("transfer"):
            answer = await self._ask(publisher, "/next", {})
        took_s = asyncio.get_running_loop().time() - asked
        flatten_s = min(float(answer.get("flatten_s", 0.0)), took_s)
        phases.add("flatten", flatten_s)
        phases.add("transfer", took_s - flatten_s)
        return answer

    async def _all(self, workers: Sequence[Worker], staged: Staged, visit: Visit) -> dict[str, str]:
        """Go on at every worker; why it failed, by id."""

        async def one(worker: Worker) -> str | None:
            try:
                await self._presence.during(worker, self._visit(worker, staged, visit, self._timeout_s))
            except WorkerFailure as failure:
                return str(failure)
            return None

        said = await asyncio.gather(*(one(worker) for worker in workers))
        return {worker.worker_id: words for worker, words in zip(workers, said, strict=True) if words is not None}

    async def _visit(self, worker: Worker, staged: Staged, visit: Visit, timeout_s: float) -> None:
        engines = staged.recipients[worker.worker_id]

        async def at(engine: Endpoint, ask: Ask) -> None:
            if engine.url not in engines:  # its process is another since
                raise WorkerFailure("restarted", f"{engine.url} was not there when the update began")
            await visit(engines[engine.url], ask)

        await self._control.at_each(worker, at, timeout_s)

    async def _ask(self, publisher: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        call = Call("POST", path, orjson.dumps(body), admin=True)
        return control_body(await self._transport.control(publisher, call, self._timeout_s))

    async def _leave(self, workers: Sequence[Worker], publisher: Endpoint, staged: Staged, *, whole: bool) -> None:
        """Tell everybody that it is over; nobody has to answer."""

        async def tell_publisher() -> None:
            call = Call("POST", "/end", orjson.dumps({"whole": whole}), admin=True)
            await self._transport.control(publisher, call, _END_S)

        async def tell_engines(worker: Worker) -> None:
            await self._visit(worker, staged, lambda one, ask: one.update.abandon(ask), _END_S)

        telling = [tell_publisher(), *([] if whole else [tell_engines(worker) for worker in workers])]
        await asyncio.gather(*telling, return_exceptions=True)


def _recipients(worker: Worker, way: Way) -> Iterator[tuple[str, _Recipient]]:
    for place, engine in enumerate(worker.engines):
        update = make_update(worker.dialect.name, way)
        if update is None:  # it is in its capabilities: a dialect says so only where it is
            raise WorkerFailure("cannot", _lack(worker, way))
        name = worker.worker_id if len(worker.engines) == 1 else f"{worker.worker_id}:{place}"
        yield engine.url, _Recipient(name, update)


def _engines(workers: Sequence[Worker], staged: Staged) -> list[dict[str, Any]]:
    return [
        {"id": one.engine_id, "dialect": worker.dialect.name, "ranks": worker.profile.ranks if worker.profile else 1}
        for worker in workers
        for one in staged.recipients[worker.worker_id].values()
    ]


def _by_engine(said: Any) -> Mapping[str, Mapping[str, Any]]:
    """Read what the publisher has for each engine; raises WorkerFailure."""
    if not isinstance(said, dict) or not all(isinstance(body, dict) for body in said.values()):
        raise WorkerFailure("bad_body", f"the publisher: expected an object for each engine, not {said!r:.200}")
    return said


def _lack(worker: Worker, way: Way) -> str:
    return f"cannot: {worker.dialect.name} takes no weights by {way} here"
