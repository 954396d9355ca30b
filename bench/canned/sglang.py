"""SGLang's routes and bodies, canned."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

from bench.canned.bodies import ID, PROMPT
from bench.canned.engine import MAX_RUNNING, Engine, wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.canned.connection import Connection

__all__ = ["answer", "speak"]

VERSION = "0.5.23"
_RID = re.compile(rb'"rid"\s*:\s*"([^"\\]+)"')
_BUDGET = re.compile(rb'"max_new_tokens"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"input_ids"\s*:\s*\[([^\]]*)\]')


def answer(ids: list[int], logprobs: list[float], finish: str, label: str) -> dict[str, Any]:
    """One answer of `/generate`, as values."""
    reason: dict[str, Any] = {"type": finish}
    if finish == "abort":
        reason |= {"message": "Aborted", "status_code": None, "err_type": None}
    else:
        reason |= {"length": len(ids)} if finish == "length" else {"matched": ids[-1] if ids else None}
    meta = {
        "id": ID,
        "finish_reason": reason,
        "prompt_tokens": PROMPT,
        "weight_version": label,
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": len(ids),
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "e2e_latency": 0.3,
        "response_sent_to_client_ts": 1795220741.89,
    }
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}


def speak(engine: Engine) -> None:
    """Give an engine SGLang's routes."""

    def generate(connection: Connection, body: bytes) -> None:
        found, allowed, prompt = _RID.search(body), _BUDGET.search(body), _PROMPT.search(body)
        rid = found[1] if found is not None else uuid.uuid4().hex.encode()
        budget = None if allowed is None else int(allowed[1])
        if not engine.generate(connection, rid, budget, 1 if prompt is None else prompt[1].count(b",") + 1):
            message = f"Duplicate request ID detected: {rid.decode()}"
            connection.json({"error": {"message": message}}, b"400 Bad Request")

    def abort(connection: Connection, body: bytes) -> None:
        asked = wanted(body)
        connection.answer(b"")
        if asked.get("abort_all"):
            engine.abort_all()
        else:
            engine.abort([str(asked.get("rid", "")).encode()])

    def pause(connection: Connection, body: bytes) -> None:
        if wanted(body).get("mode", "abort") == "abort":
            engine.abort_all()
        engine.paused = True
        connection.json({"message": "Generation paused successfully.", "status": "ok"})

    def go_on(connection: Connection, _: bytes) -> None:
        engine.go_on()
        connection.json({"message": "Generation continued successfully.", "status": "ok"})

    def update(connection: Connection, body: bytes) -> None:
        asked = wanted(body)
        label = asked.get("new_version", asked.get("weight_version"))
        if label is not None:
            engine.bodies.set_version(str(label))
        message = f"Weight version updated to {label}"
        connection.json({"success": True, "message": message, "new_version": label, "num_paused_requests": 0})

    def loads(connection: Connection, _: bytes) -> None:
        load = {"dp_rank": 0, "num_running_reqs": len(engine.live), "num_waiting_reqs": 0}
        load["max_running_requests"] = MAX_RUNNING
        connection.json({"timestamp": "", "version": VERSION, "num_accelerators": 1, "loads": [load]})

    engine.routes |= {
        b"/generate": generate,
        b"/abort_request": abort,
        b"/pause_generation": pause,
        b"/continue_generation": go_on,
        b"/update_weight_version": update,
        b"/update_weights_from_disk": update,
        b"/flush_cache": lambda connection, _: connection.answer(b"Cache flushed.\n"),
        b"/v1/loads": loads,
        b"/ping": lambda connection, _: connection.answer(b""),
        b"/health": lambda connection, _: connection.answer(b""),
    } | _about(engine)


def _about(engine: Engine) -> dict[bytes, Callable[[Connection, bytes], None]]:
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "max_running_requests": MAX_RUNNING}
    return {
        b"/model_info": lambda connection, _: connection.json(
            {"model_path": "canned", "is_generation": True, "weight_version": engine.bodies.weight_version}
        ),
        b"/server_info": lambda connection, _: connection.json(
            {"model_path": "canned", "version": VERSION, **sizes, "canned": engine.counts}
        ),
    }
