"""vLLM's routes and bodies, canned: `/inference/v1/generate`, with scale-out endpoints and development mode on."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from bench.canned.bodies import ID, PROMPT, TOTAL
from bench.canned.engine import Engine, wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.canned.connection import Connection

__all__ = ["answer", "speak"]

VERSION = "0.32.0"
CREATED = 1795221010
PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request: answers have it, aborts name it."""
_ID = re.compile(rb'"request_id"\s*:\s*"([^"\\]+)"')
_BUDGET = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"token_ids"\s*:\s*\[([^\]]*)\]')
_GAUGES = (
    '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="canned"} %d.0\n'
    '# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0",model_name="canned"} 0.0\n'
)


def answer(ids: list[int], logprobs: list[float], finish: str, label: str) -> dict[str, Any]:
    """One answer of `/inference/v1/generate`, as values; `logprobs: 0` gives each token a list of one."""
    tokens = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, logprobs, strict=True)]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}] if ids else [],
        "logprobs": {"content": [{**token, "top_logprobs": [token]} for token in tokens]},
    }
    usage = {"prompt_tokens": PROMPT, "total_tokens": TOTAL, "completion_tokens": len(ids)}
    missing = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")
    return {
        "request_id": PREFIX + ID,
        "model": "canned",
        "created": CREATED,
        "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
        **dict.fromkeys((*missing, "kv_transfer_params", "ec_transfer_params")),
        "output_mode": "tokens",
        "choices": [choice],
    }


def speak(engine: Engine) -> None:
    """Give an engine vLLM's routes."""

    def generate(connection: Connection, body: bytes) -> None:
        found, allowed, prompt = _ID.search(body), _BUDGET.search(body), _PROMPT.search(body)
        wire_id = found[1] if found is not None else uuid.uuid4().hex.encode()
        budget = None if allowed is None else int(allowed[1])
        if not engine.generate(connection, wire_id, budget, 1 if prompt is None else prompt[1].count(b",") + 1):
            connection.json({"error": {"message": "duplicate id", "code": 400}}, b"400 Bad Request")

    def abort(connection: Connection, body: bytes) -> None:
        named = wanted(body).get("request_ids") or []
        if named:
            engine.abort(str(name).removeprefix(PREFIX).encode() for name in named)
        else:
            engine.abort_all()
        connection.json({"status": "aborted", "aborted": len(named)})

    def abort_by_id(connection: Connection, body: bytes) -> None:
        engine.abort(str(name).removeprefix(PREFIX).encode() for name in wanted(body).get("request_ids", ()))
        connection.answer(b"")

    def pause(connection: Connection, query: bytes) -> None:
        if parse_qs(query.decode()).get("mode", ["abort"]) == ["abort"]:
            engine.abort_all()
        engine.paused = True
        connection.json({"status": "paused"})

    def resume(connection: Connection, _: bytes) -> None:
        engine.go_on()
        connection.json({"status": "resumed"})

    def set_version(connection: Connection, body: bytes) -> None:
        label = str(wanted(body).get("new_version"))
        engine.bodies.set_version(label)
        connection.json({"success": True, "new_version": label})

    engine.routes |= {
        b"/inference/v1/generate": generate,
        b"/inference/v1/abort_requests": abort_by_id,
        b"/abort_requests": abort,
        b"/pause": pause,
        b"/resume": resume,
        b"/update_weight_version": set_version,
        b"/collective_rpc": lambda connection, _: connection.json({"results": [None]}),
        b"/reset_prefix_cache": lambda connection, _: connection.json({"success": True}),
    }
    engine.routes |= _about(engine)


def _about(engine: Engine) -> dict[bytes, Callable[[Connection, bytes], None]]:
    model = {"id": "canned", "object": "model", "created": CREATED, "root": "canned", "parent": None}
    config = {"model_config": {"logprobs_mode": "raw_logprobs", "tokenizer": "canned"}}
    return {
        b"/health": lambda connection, _: connection.answer(b""),
        b"/ping": lambda connection, _: connection.answer(b""),
        b"/version": lambda connection, _: connection.json({"version": VERSION}),
        b"/v1/models": lambda connection, _: connection.json(
            {"object": "list", "data": [{**model, "owned_by": "vllm", "max_model_len": 1 << 20}]}
        ),
        b"/openapi.json": lambda connection, _: connection.json(
            {"paths": {path.decode(): {} for path in engine.routes}}
        ),
        b"/is_paused": lambda connection, _: connection.json({"is_paused": engine.paused}),
        b"/weight_info": lambda connection, _: connection.json({"weight_version": engine.bodies.weight_version}),
        b"/server_info": lambda connection, _: connection.json({"vllm_config": config, "canned": engine.counts}),
        b"/metrics": lambda connection, _: connection.answer((_GAUGES % len(engine.live)).encode()),
    }
