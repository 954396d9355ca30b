"""Weights from a publisher: bucket by bucket to every engine, by the way the publisher has.

The publisher is asked (`POST /begin`, then `/next` until there is none, then `/end`); engines are told what it answers
for each of them, all at once, and the next bucket is asked for when each has the last.

| call | body | answer |
|---|---|---|
| `/begin` | `{version, engines: [{id, dialect, ranks, since}]}` | `{manifest?, bytes?, check_finite?, openings?}` |
| `/next` | `{bucket}`, counted from 0 | `{bodies: {id: {…}} or null, bytes, flatten_s}` |
| | `{bucket, events: false, why}`: the same again | likewise, without an event, as all that follow |
| `/end` | `{whole}` | anything |

Invariants:

- No engine that stages computes with anything of an update before all of them have all of it.
- One that is needed and fails ends the update for all, any other for itself: what was staged is forgotten, everywhere
  or there. An engine that loads as it comes is named as touched then, and has weights of no version.
- An engine that cannot do with the event of a bucket is given it once more without one; those that have it are not.
- The publisher is told how it ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from rollout_svc.engines import Call, Endpoint, Reply, Transport
from rollout_svc.engines.parsing import OK, control_body
from rollout_svc.engines.updates.protocol import NO_EVENT, Ask, EngineUpdate, Opening, Reverting, Way
from rollout_svc.engines.updates.registry import make_update
from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker

__all__ = ["Publisher", "Staged", "Staging"]

_END_S: Final = 10.0  # seconds for taking leave of everybody
_REFUSAL_CHARS: Final = 1000  # of the publisher's words: a list of names

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


class _Bucket:
    """One bucket on its way to every engine.

    Attributes:
        eventless: what those engines said that cannot do with its event, by their ids.
    """

    __slots__ = ("_bodies", "eventless")

    def __init__(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        self.eventless: dict[str, str] = {}
        self._bodies = bodies

    async def load(self, one: _Recipient, ask: Ask) -> None:
        """Have an engine load it, or write down that it may without the event; raises WorkerFailure."""
        try:
            await self._load(one, ask)
        except WorkerFailure as failure:
            if failure.kind != NO_EVENT:
                raise
            self.eventless[one.engine_id] = failure.message

    def again(self, bodies: Mapping[str, Mapping[str, Any]]) -> Visit:
        """Give it once more, as it is without an event, to those that are to have it so."""
        self._bodies = bodies

        async def load(one: _Recipient, ask: Ask) -> None:
            if one.engine_id in self.eventless:
                await self._load(one, ask)

        return load

    async def _load(self, one: _Recipient, ask: Ask) -> None:
        if one.engine_id not in self._bodies:
            raise WorkerFailure("bad_body", f"the publisher has nothing for {one.engine_id}")
        await one.update.load(ask, self._bodies[one.engine_id])


@dataclass(slots=True)
class Staged:
    """What came of handing weights over.

    Attributes:
        failed: why, by worker id; all of them where it was the publisher. Empty: all have all of it.
        whole: all the others have all of it.
        recipients: by worker id, then by the engine's url.
    """

    failed: dict[str, str] = field(default_factory=dict)
    whole: bool = False
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

    async def stage(
        self, workers: Sequence[Worker], publisher: Publisher, version: int, phases: Phases, *, needed: Collection[str]
    ) -> Staged:
        """Hand every worker what a publisher has; those that fail are told that it is over.

        Args:
            workers: to whom.
            publisher: who has it.
            version: of the weights.
            phases: what it takes is added.
            needed: ids of those without which it ends for the others as well.
        """
        lacking = {w.worker_id: _lack(w, publisher.way) for w in workers if publisher.way not in w.capabilities}
        able = [worker for worker in workers if worker.worker_id not in lacking]
        if not able or not lacking.keys().isdisjoint(needed):
            return Staged(lacking)
        staged = Staged(lacking, recipients={w.worker_id: dict(_recipients(w, publisher.way)) for w in able})
        try:
            staged.whole = await self._stage(able, publisher.endpoint, version, staged, phases, needed)
        except WorkerFailure as failure:
            staged.failed |= {worker.worker_id: f"the publisher: {failure}" for worker in able}
        finally:
            # Also where the caller was cancelled: an engine that waits for the rest would keep what it has staged.
            await asyncio.shield(self._leave(able, publisher.endpoint, staged))
        return staged

    async def close(self, worker: Worker, staged: Staged, version: int) -> None:
        """Have a worker take what it was handed for its weights; raises WorkerFailure."""

        async def close(one: _Recipient, ask: Ask) -> None:
            try:
                await one.update.close(ask, version)
            except WorkerFailure as failure:
                if (
                    not failure.accepted
                ):  # it refused, and would keep what it has staged; one that is at it is left alone
                    with suppress(WorkerFailure, TimeoutError):
                        async with asyncio.timeout(_END_S):
                            await one.update.abandon(ask)
                raise

        await self._visit(worker, staged, close, self._timeout_s)

    async def revert(self, worker: Worker, staged: Staged, version: int) -> None:
        """Have a worker go back to the weights before those it was handed and has closed; raises WorkerFailure."""

        async def back(one: _Recipient, ask: Ask) -> None:
            if not isinstance(one.update, Reverting):
                raise WorkerFailure("cannot", f"{worker.dialect.name} keeps no weights to go back to")
            await one.update.revert(ask, version)

        await self._visit(worker, staged, back, self._timeout_s)

    async def _stage(
        self,
        workers: Sequence[Worker],
        publisher: Endpoint,
        version: int,
        staged: Staged,
        phases: Phases,
        needed: Collection[str],
    ) -> bool:
        """Carry all there is; false where it ended before. Whoever failed is written down."""
        there = list(workers)

        async def have(visit: Visit) -> bool:
            with phases.during("load"):
                failed = await self._all(there, staged, visit)
            staged.failed |= failed
            there[:] = [worker for worker in there if worker.worker_id not in failed]
            return bool(there) and failed.keys().isdisjoint(needed)

        with phases.during("transfer"):
            answer = await self._ask(publisher, "/begin", {"version": version, "engines": _engines(workers, staged)})
        openings = _by_engine(answer.get("openings") or {})
        if type(answer.get("bytes")) is int and answer["bytes"] >= 0:
            phases.expect(answer["bytes"])
        manifest, check_finite = answer.get("manifest"), answer.get("check_finite") is True

        async def begin(one: _Recipient, ask: Ask) -> None:
            own = openings.get(one.engine_id, {})
            await one.update.open(ask, Opening(manifest, check_finite, version, own))

        going = await have(begin)
        while going:
            answer = await self._next(publisher, phases)
            if answer["bodies"] is None:
                return True
            bucket = _Bucket(_by_engine(answer["bodies"]))
            going = await have(bucket.load)
            if going and bucket.eventless:
                answer = await self._next(publisher, phases, without_event=bucket.eventless)
                going = await have(bucket.again(_by_engine(answer["bodies"])))
            if going:
                phases.staged(int(_number(answer, "bytes")))
        return False

    async def _next(
        self, publisher: Endpoint, phases: Phases, *, without_event: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The next bucket; it says itself for how long it was flattened.

        Args:
            publisher: who has it.
            phases: what it takes is added.
            without_event: the last one once more: what engines said of its event, by their ids.

        Raises:
            WorkerFailure: the publisher failed, or it is none: only one that says so has no more buckets.
        """
        asked = asyncio.get_running_loop().time()
        with phases.at("transfer"):
            # By its number: a call whose connection was closed is made once more, and must not skip a bucket.
            asking: dict[str, Any] = {"bucket": phases.buckets}
            if without_event is not None:
                why = "; ".join(f"{engine_id}: {words}" for engine_id, words in without_event.items())
                asking |= {"events": False, "why": why[:_REFUSAL_CHARS]}
            answer = await self._ask(publisher, "/next", asking)
        took_s = asyncio.get_running_loop().time() - asked
        if "bodies" not in answer:
            raise WorkerFailure("bad_body", f"expected `bodies`, an object or null, not {answer!r:.200}")
        flatten_s = min(_number(answer, "flatten_s"), took_s)
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
        reply = await self._transport.control(publisher, call, self._timeout_s)
        if (words := _refusal(reply)) is not None:
            raise WorkerFailure(f"http_{reply.status}", f"HTTP {reply.status}: {words}")
        return control_body(reply)

    async def _leave(self, workers: Sequence[Worker], publisher: Endpoint, staged: Staged) -> None:
        """Tell everybody that it is over, but for those that have all of it; nobody has to answer."""

        async def tell_publisher() -> None:
            call = Call("POST", "/end", orjson.dumps({"whole": staged.whole}), admin=True)
            await self._transport.control(publisher, call, _END_S)

        async def tell_engines(worker: Worker) -> None:
            async with asyncio.timeout(_END_S):  # for all that there is to say, to an engine that answers none of it
                await self._visit(worker, staged, lambda one, ask: one.update.abandon(ask), _END_S)

        left = [worker for worker in workers if not staged.whole or worker.worker_id in staged.failed]
        telling = [tell_publisher(), *(tell_engines(worker) for worker in left)]
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
        {
            "id": one.engine_id,
            "dialect": worker.dialect.name,
            "ranks": worker.profile.ranks if worker.profile else 1,
            "since": worker.active_since,
        }
        for worker in workers
        for one in staged.recipients[worker.worker_id].values()
    ]


def _by_engine(said: Any) -> Mapping[str, Mapping[str, Any]]:
    """Read what the publisher has for each engine; raises WorkerFailure."""
    if not isinstance(said, dict) or not all(isinstance(body, dict) for body in said.values()):
        raise WorkerFailure("bad_body", f"the publisher: expected an object for each engine, not {said!r:.200}")
    return said


def _refusal(reply: Reply) -> str | None:
    """In its own words, all of them, why the publisher refused; None where it did not, or has none."""
    if reply.status == OK:
        return None
    with suppress(ValueError):
        body = orjson.loads(reply.body)
        error = body.get("error") if isinstance(body, dict) else None
        return error[:_REFUSAL_CHARS] if isinstance(error, str) else None
    return None


def _number(answer: Mapping[str, Any], key: str) -> float:
    """Read a number from 0; raises WorkerFailure."""
    found = answer.get(key, 0)
    if type(found) not in (int, float) or not 0 <= found < math.inf:
        raise WorkerFailure("bad_body", f"{key}: expected a number from 0, not {found!r:.100}")
    return float(found)


def _lack(worker: Worker, way: Way) -> str:
    return f"cannot: {worker.dialect.name} takes no weights by {way} here"
