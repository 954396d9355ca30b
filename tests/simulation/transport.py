"""The wire between one life of the service and the engines: latency, and everything that goes wrong on the way.

Invariants:

- It is the transport port: bytes in, bytes out, WorkerFailure as `engines/http.py` raises it.
- What is cancelled before it arrived never arrives; what is cancelled later is a closed connection to the engine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn

import orjson

from rollout_svc.engines import Endpoint, Reply
from rollout_svc.engines.calls import Call
from rollout_svc.engines.dialect import StreamReader
from rollout_svc.errors import WorkerFailure
from tests.simulation import doors
from tests.simulation.engine import Request, SimEngine
from tests.simulation.faults import ABORT, EXPERTS, FREEZE, REQUEST, Strike

if TYPE_CHECKING:
    from tests.simulation.life import Life

__all__ = ["SimTransport"]

_FREEZES: Final = frozenset({"/pause_generation", "/continue_generation"})


class SimTransport:
    """Carries calls of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call."""
        engine, witness = self._world.engines[endpoint.url], self._life.witness
        body = orjson.loads(call.body or b"{}")
        request = Request(body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"], self._life.number)
        if body.get("return_routed_experts"):
            self._world.routed += 1
            request.experts_from, request.serial = body["routed_experts_start_len"], self._world.routed
        witness.sending(endpoint, engine, request)
        name = self._world.faults.draw(REQUEST)
        if name is None and request.experts_from is not None:
            name = request.lie = self._world.faults.draw(EXPERTS)
            engine.lied = engine.lied or request.lie == "experts_missing"
        strike = self._world.faults.strike(name) if name is not None else None
        try:
            reply = await self._exchange(engine, request, strike)
        except WorkerFailure as failure:
            self._world.say("wire", f"{engine.name}: {failure.kind}", request)
            witness.closed(request)
            raise
        except asyncio.CancelledError:
            self._world.say("wire", f"{engine.name}: closed by us", request)
            witness.closed(request)
            self._look_at_limit(endpoint, request)
            raise
        finally:
            if strike is not None:
                strike.end()
        witness.received(endpoint, engine, request, reply)
        return reply

    def _look_at_limit(self, endpoint: Endpoint, request: Request) -> None:
        worker = self._life.worker(endpoint)
        call = worker.calls.get(request.rid)
        if call is not None and call.cancelled_for == "timeout":
            self._life.wire_log.check_timeout(worker, call)

    async def _exchange(self, engine: SimEngine, request: Request, strike: Strike | None) -> Reply:
        world, rng = self._world, self._world.rng
        fault = None if strike is None else strike.name
        await asyncio.sleep(rng.uniform(0.0005, 0.01))
        while engine.frozen and engine.up:  # the kernel accepts, nobody reads
            await asyncio.shield(engine.thawed)
        self._refuse(engine)
        if fault == "reset_before":
            await world.ambush()
            _break_off(engine, "reset")
        accepted = engine.accept(request, stuck=fault == "answer_never")
        try:
            if fault == "reset_after":
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                await world.ambush()
                if not request.done:
                    _break_off(engine, "reset")
            if not await accepted:
                _break_off(engine, "went away")
            await self._way_back(fault)
        except (asyncio.CancelledError, WorkerFailure):
            engine.disconnected(request)
            raise
        reply = doors.answer_of(request)
        last, world.last_answers[engine.name] = world.last_answers.get(engine.name), reply
        if fault == "answer_malformed":
            return doors.broken(rng.randrange(70))
        if fault == "answer_twice" and last is not None:
            return last
        return reply

    async def _way_back(self, fault: str | None) -> None:
        world, rng = self._world, self._world.rng
        if fault == "answer_late" or (fault in EXPERTS and rng.random() < 0.5):  # a lie may come at any rung
            await world.at_most(rng.uniform(0.2, 6.0))
        elif fault == "answer_after_resume":
            await world.until_resumed()
        else:
            await asyncio.sleep(rng.uniform(0.0005, 0.01))

    def _refuse(self, engine: SimEngine) -> None:
        if not engine.up or engine.refusing:
            raise WorkerFailure("connection", f"{engine.url}: refused", hard=True)

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> NoReturn:
        """No worker here streams."""
        raise NotImplementedError

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make one short control attempt."""
        engine, log, reply = self._world.engines[endpoint.url], self._life.wire_log, None
        log.begins(endpoint.url, call.path)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._control(endpoint, engine, call)
                return reply
        except TimeoutError as error:
            message = f"{call.method} {call.path}: no answer in {timeout_s:.2f} s"
            raise WorkerFailure("control_timeout", message, accepted=True) from error
        finally:
            log.ends(endpoint.url, call.path, confirmed=reply is not None and reply.status == 200)

    async def _control(self, endpoint: Endpoint, engine: SimEngine, call: Call) -> Reply:
        world, rng, witness = self._world, self._world.rng, self._life.witness
        aborting = call.path == "/abort_request"
        fault = world.faults.draw(ABORT if aborting else FREEZE if call.path in _FREEZES else ())
        strike = world.faults.strike(fault) if fault is not None else None
        witness.controlling(endpoint, engine, call)
        try:
            await asyncio.sleep(rng.uniform(0.0005, 0.005))
            while engine.frozen and engine.up:
                await asyncio.shield(engine.thawed)
            if not engine.up:
                self._refuse(engine)
            if fault in ("abort_lost", "freeze_lost"):
                await world.at_most(60.0)
            elif fault == "abort_delayed":
                await world.at_most(rng.uniform(0.05, 3.0))
            if fault == "abort_ignored":
                reply = Reply(200, b"")
            elif fault == "freeze_refused":
                reply = Reply(503, b"not now")
            elif fault == "freeze_delayed":  # it arrives although its caller has left meanwhile
                reply = await asyncio.shield(world.spawn(self._late(engine, call, rng.uniform(0.05, 3.0))))
            else:
                if aborting:
                    witness.abort_arrives(endpoint, engine, call)
                witness.control_arrives(endpoint, engine, call)
                world.say(engine.name, call.path, (call.body or b"").decode()[:60])
                reply = await doors.control(engine, call)
            await asyncio.sleep(rng.uniform(0.0005, 0.005))
            if not engine.up:
                _break_off(engine, "went away")
            return reply
        finally:
            if strike is not None:
                strike.end()

    async def _late(self, engine: SimEngine, call: Call, delay_s: float) -> Reply:
        await self._world.at_most(delay_s, sent=True)
        while engine.frozen and engine.up:
            await asyncio.shield(engine.thawed)
        if not engine.up:
            return Reply(500, b"gone")
        self._world.say(engine.name, "late", call.path)
        return await doors.control(engine, call)

    async def close(self) -> None:
        """Nothing to close."""


def _break_off(engine: SimEngine, how: str) -> NoReturn:
    """A connection that was there is gone."""
    raise WorkerFailure("connection", f"{engine.url}: {how}", hard=True, accepted=True)
