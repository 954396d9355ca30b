"""What a simulated engine answers over HTTP: the bytes of SGLang's routes.

Invariant: pure with respect to time: whoever calls has waited for the network already. Only loading weights takes time.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call, Reply
from tests.simulation.engine import Request, SimEngine
from tests.simulation.routing import lifted_of

__all__ = ["answer_of", "broken", "control"]

_OK: Final = Reply(200, b"")
_BROKEN: Final = (
    b"",
    b"<html>502</html>",
    b'{"output_ids":[1,2]',
    b'{"text":"","output_ids":[1,2],"meta_info":{"finish_reason":{"type":"odd"},"output_token_logprobs":[]}}',
    b'{"output_ids":[1,2],"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[-0.5,1,null]]}}',
)


def answer_of(request: Request) -> Reply:
    """The answer of `/generate`."""
    assert request.engine is not None
    ids, spans, start = request.tokens, [], 0
    for version, run in itertools.groupby(request.versions):
        length = len(list(run))
        spans.append({"version": str(version), "start": start, "end": start + length})
        start += length
    finish: dict[str, Any] = {"type": request.finish}
    meta = {
        "id": request.rid,
        "finish_reason": finish,
        "weight_version": request.engine.label,
        "weight_versions": spans,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    body = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
    return Reply(200, body, lifted=lifted_of(request))


def broken(number: int) -> Reply:
    """An answer that is none."""
    if number % 7 == 0:
        return Reply((500, 400, 413, 429, 503)[number // 7 % 5], b"no")
    return Reply(200, _BROKEN[number % len(_BROKEN)])


async def control(engine: SimEngine, call: Call) -> Reply:
    """Carry out a control call that has arrived."""
    body: dict[str, Any] = orjson.loads(call.body) if call.body else {}
    path = call.path.partition("?")[0]
    if path == "/ping":
        return _OK
    if path == "/model_info":
        return Reply(200, orjson.dumps(engine.info()))
    if path == "/server_info" and engine.routed:
        return Reply(200, b'{"enable_return_routed_experts":true}')
    if path == "/v1/loads":
        counts = {"num_running_reqs": len(engine.running), "num_waiting_reqs": len(engine.waiting)}
        return Reply(200, orjson.dumps({"loads": [counts]}))
    if path == "/abort_request":
        engine.abort(None if body.get("abort_all") else body["rid"])
        return _OK
    if path == "/pause_generation":
        engine.pause(body["mode"])
        engine.world.life.boots[engine.name] = engine.boots
        return Reply(200, b'{"status":"ok"}')
    if path == "/continue_generation":
        engine.go_on()
        return Reply(200, b'{"status":"ok"}')
    if path == "/flush_cache":
        return _OK if not engine.running or engine.paused == "retract" else Reply(400, b"busy")
    if path == "/update_weight_version":
        engine.label = body["new_version"]
        return Reply(200, b'{"success":true}')
    if path == "/update_weights_from_disk":
        return await asyncio.shield(engine.world.spawn(_load(engine, int(str(body["model_path"]).rpartition("v")[2]))))
    return Reply(404, b"")


async def _load(engine: SimEngine, version: int) -> Reply:
    """Load when nothing runs: SGLang holds a writer's lock, so what runs ends first and what comes waits.

    It goes on when its caller has left: an update that was given up may still arrive.
    """
    world, boots = engine.world, engine.boots
    engine.load_begins()
    while engine.running and engine.paused is None:
        idle = world.future()
        engine.idle_waiters.append(idle)
        await idle
    await asyncio.sleep(world.rng.uniform(0.01, 0.3))
    if not engine.up or engine.boots != boots:
        return Reply(500, b"gone")
    engine.load_ends(version)
    return Reply(200, b'{"success":true}')
