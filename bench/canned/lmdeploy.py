"""LMDeploy's routes and bodies, canned: PyTorch backend, with abort handling and logprobs on."""

from __future__ import annotations

import re
import time
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.canned.bodies import PROMPT
from bench.canned.engine import Engine, wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.canned.connection import Connection

__all__ = ["answer", "speak"]

_SESSION = re.compile(rb'"session_id"\s*:\s*(\d+)')
_BUDGET = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"input_ids"\s*:\s*\[([^\]]*)\]')
_GAUGES = (
    "# TYPE lmdeploy:num_requests_running gauge\n"
    'lmdeploy:num_requests_running{engine="0",model_name="canned"} %d.0\n'
    "# TYPE lmdeploy:num_requests_waiting gauge\n"
    'lmdeploy:num_requests_waiting{engine="0",model_name="canned"} 0.0\n'
    "# TYPE process_start_time_seconds gauge\n"
    "process_start_time_seconds %.9e\n"
)


def answer(ids: list[int], logprobs: list[float], finish: str, _: str) -> dict[str, Any]:
    """One answer of `/generate`, as values; it says neither which request nor which weights it is of."""
    meta = {
        "prompt_tokens": PROMPT,
        "completion_tokens": len(ids),
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[value, token] for value, token in zip(logprobs, ids, strict=True)],
        "routed_experts": None,
    }
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}


def speak(engine: Engine) -> None:
    """Give an engine LMDeploy's routes."""
    anonymous = count(1)

    def generate(connection: Connection, body: bytes) -> None:
        found, allowed, prompt = _SESSION.search(body), _BUDGET.search(body), _PROMPT.search(body)
        if prompt is not None and not prompt[1].strip():
            connection.json(_refusal("The input_ids must not be an empty list"), b"400 Bad Request")
            return
        session = found[1] if found is not None else b"%d" % next(anonymous)
        budget = None if allowed is None else int(allowed[1])
        if not engine.generate(connection, session, budget, 1 if prompt is None else prompt[1].count(b",") + 1):
            connection.json({"message": "Internal Server Error"}, b"500 Internal Server Error")

    def abort(connection: Connection, body: bytes) -> None:
        asked = wanted(body)
        if asked.get("abort_all"):
            engine.abort_all()
        elif not engine.abort([b"%d" % asked.get("session_id", -1)]):
            connection.json(_refusal(f"Session {asked.get('session_id')} not found."), b"400 Bad Request")
            return
        connection.answer(b"")

    engine.routes |= {b"/generate": generate, b"/abort_request": abort} | _about(engine)


def _refusal(message: str) -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "code": 400, "param": None, "object": "error"}


def _about(engine: Engine) -> dict[bytes, Callable[[Connection, bytes], None]]:
    model = {"id": "canned", "object": "model", "created": 1795221010, "owned_by": "lmdeploy", "root": "canned"}
    started = time.time()
    return {
        b"/distserve/engine_info": lambda connection, _: connection.json({"tp_size": 1, "dp_size": 1}),
        b"/health": lambda connection, _: connection.json({"status": "healthy", "message": "Engine is healthy."}),
        b"/v1/models": lambda connection, _: connection.json({"object": "list", "data": [{**model, "parent": None}]}),
        b"/is_sleeping": lambda connection, _: connection.json({"is_sleeping": False}),
        b"/openapi.json": lambda connection, _: connection.json(
            {"info": {"title": "FastAPI", "version": "0.1.0"}, "paths": {path.decode(): {} for path in engine.routes}}
        ),
        b"/metrics": lambda connection, _: connection.answer((_GAUGES % (len(engine.live), started)).encode()),
    }
