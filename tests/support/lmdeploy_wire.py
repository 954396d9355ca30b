"""The shapes of the LMDeploy dialect as its server writes them: pure functions, no state.

- Key order is the server's own, so that a recorded answer can be compared as text.
- A validation failure is a `(status, payload)` pair, never an exception.
- Of a `stop` the last id is the stop token: it is left out, with its logprob, unless the request asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.sglang_wire import LOGPROB, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.support.routing import Routing

__all__ = [
    "ABORT_IS_OFF",
    "ASLEEP",
    "LOGPROBS_ARE_OFF",
    "NOT_JSON",
    "Problem",
    "budget",
    "check_abort",
    "check_generate",
    "check_update",
    "chunk",
    "error",
    "generation",
    "kept",
    "metrics",
    "models",
    "openapi",
]

Problem = tuple[int, Any]

STOP_TEXT = "<|eos|>"
"""Text of a stop token that is returned; generated ids have none."""
ABORT_IS_OFF = "This server does not support abort requests. Enable with --enable-abort-handling flag."
EXPERTS_ARE_OFF = (
    "routed experts requested but not configured in engine configuration. "
    "May start the api_server with --enable-return-routed-experts flag."
)
LOGPROBS_ARE_OFF = "return_logprob(True) requested but not enabled logprobs_mode in engine configuration."
NOT_JSON = "Unsupported Media Type: Only 'application/json' is allowed"
STARTED_AT = 1795220330.25
"""When the first process of every fake started, in seconds since 1970; each restart is a hundred later."""
_KINDS = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "session_id": ((int,), "integer"),
    "max_tokens": ((int,), "integer"),
    "input_ids": ((list,), "list"),
    "prompt": ((str,), "string"),
    "temperature": ((int, float), "number"),
    "top_p": ((int, float), "number"),
    "top_k": ((int,), "integer"),
    "return_logprob": ((bool,), "boolean"),
    "stream": ((bool,), "boolean"),
    "abort_all": ((bool,), "boolean"),
}
_ROUTES = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/generate", "/health", "/abort_request", "/sleep",
    "/wakeup", "/is_sleeping", "/update_weights", "/init_weights_update_group", "/update_weights_from_distributed",
    "/destroy_weights_update_group", "/distserve/engine_info", "/terminate",
)  # fmt: skip


def error(status: int, message: str) -> Problem:
    """An error in the server's envelope."""
    kind = _KINDS.get(status, "invalid_request_error")
    return status, {"message": message, "type": kind, "code": status, "param": None, "object": "error"}


ASLEEP = error(503, "Engine is sleeping; call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache).")
"""What a generation meets until all of the engine is awake."""


def kept(reply: Reply, body: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The ids and logprobs that are returned of what was generated."""
    ids = reply.ids(budget(body))
    logprobs = [LOGPROB] * len(ids) if reply.logprobs is None else list(reply.logprobs)
    if reply.finish == "stop" and not body.get("include_stop_str_in_output"):
        ids, logprobs = ids[:-1], logprobs[:-1]
    return ids, logprobs


def budget(body: Mapping[str, Any]) -> int:
    """The budget of a request, in tokens: 128 where it does not say."""
    return int(body.get("max_tokens") or 128)


def chunk(
    body: Mapping[str, Any],
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    made: int,
    finish: str | None = None,
    text: str = "",
) -> dict[str, Any]:
    """Build one answer, or one chunk of a stream: its own ids, and how many were made so far."""
    pairs = [[value, token] for value, token in zip(logprobs, ids, strict=True)]
    return {
        "text": text,
        "output_ids": list(ids),
        "meta_info": {
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": made,
            "finish_reason": None if finish is None else {"type": finish.removesuffix("-queued")},
            "output_token_logprobs": (pairs or None) if body.get("return_logprob") else None,
            "routed_experts": None,
        },
    }


def generation(
    body: Mapping[str, Any],
    reply: Reply,
    *,
    routing: Routing | None = None,
    share: Callable[[Any], str] | None = None,
) -> dict[str, Any]:
    """Build a whole `/generate` answer.

    Args:
        body: the request.
        reply: what the generation came to.
        routing: of its model, where it was started to return that.
        share: keeps all rows of that, the last token's of a `stop` included, and returns their key.
    """
    ids, logprobs = kept(reply, body)
    text = STOP_TEXT if reply.finish == "stop" and body.get("include_stop_str_in_output") else ""
    answer = chunk(body, ids, logprobs, made=len(ids), finish=reply.finish, text=text)
    if routing is not None and body.get("return_routed_experts"):
        told = [*body["input_ids"], *(ids if share is None else reply.ids(budget(body)))]
        answer["meta_info"]["routed_experts"] = routing.numbers(told) if share is None else share(routing.hidden(told))
    answer["meta_info"].update(reply.meta or {})
    return answer


def models(name: str) -> dict[str, Any]:
    """Build a `/v1/models` answer."""
    permission = {
        "id": "modelperm-H38nivbATd2TpWrvPewmst",
        "object": "model_permission",
        "created": int(STARTED_AT),
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": True,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": name,
        "object": "model",
        "created": int(STARTED_AT),
        "owned_by": "lmdeploy",
        "root": name,
        "parent": None,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def openapi() -> dict[str, Any]:
    """Build an `/openapi.json` answer, as far as a client looks: its paths. The version is not the engine's."""
    return {"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": {p: {} for p in _ROUTES}}


def metrics(*, restarts: int, running: int, waiting: int, model: str) -> str:
    """Build a `/metrics` page: when the process started, and gauges that are as old as the caller makes them."""
    labels = f'{{engine="0",model_name="{model}"}}'
    return (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {STARTED_AT + 100 * restarts:.9e}\n"
        "# HELP lmdeploy:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE lmdeploy:num_requests_running gauge\n"
        f"lmdeploy:num_requests_running{labels} {float(running)}\n"
        "# HELP lmdeploy:num_requests_waiting Number of requests waiting to be processed.\n"
        "# TYPE lmdeploy:num_requests_waiting gauge\n"
        f"lmdeploy:num_requests_waiting{labels} {float(waiting)}\n"
    )


def _check_types(body: Any) -> Problem | None:
    if not isinstance(body, dict):
        return error(400, "Input should be a valid dictionary or object to extract fields from")
    for key, (kinds, word) in _TYPES.items():
        value = body.get(key)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return error(400, f"{key}: Input should be a valid {word}")
    for index, token in enumerate(body.get("input_ids") or []):
        if type(token) is not int:
            return error(400, f"input_ids.{index}: Input should be a valid integer")
    return None


def check_generate(
    body: Any, *, context: int, logprobs: bool, experts: bool = False, occupied: Mapping[int, Any]
) -> Problem | None:
    """Say what the server would refuse in a `/generate` body, in its order, or None.

    Args:
        body: what was sent.
        context: longest prompt, in tokens.
        logprobs: whether it was started with a `--logprobs-mode`.
        experts: whether it was started with `--enable-return-routed-experts`.
        occupied: its sessions by *internal* id, which it compares the caller's with.
    """
    problem = _check_types(body)
    if problem is not None:
        return problem
    if body.get("return_logprob") and not logprobs:
        return error(400, LOGPROBS_ARE_OFF)
    if body.get("return_routed_experts") and not experts:
        return error(400, EXPERTS_ARE_OFF)
    ids, most = body.get("input_ids"), body.get("max_tokens", 128)
    if (body.get("prompt") is None) == (ids is None):
        return error(400, "You must specify exactly one of prompt or input_ids")
    if not ids:
        return error(400, "The input_ids must not be an empty list")
    if most <= 0:
        return error(400, f"The max_tokens {most} must be a positive integer.")
    if body.get("session_id", -1) in occupied:
        return error(400, f"The session_id {body['session_id']} is occupied.")
    top_p, top_k, temperature = body.get("top_p"), body.get("top_k"), body.get("temperature")
    if top_p is not None and not 0 < top_p <= 1:
        return error(400, f"The top_p {float(top_p)} must be in (0, 1].")
    if top_k is not None and top_k < 0:
        return error(400, f"The top_k {top_k} cannot be a negative integer.")
    if temperature is not None and not 0 <= temperature <= 2:
        return error(400, f"The temperature {float(temperature)} must be in [0, 2]")
    if len(ids) > context:
        return error(400, "The request exceeds the model context length.")
    return None


def check_abort(body: Any) -> Problem | None:
    """Say what the server would refuse in an `/abort_request` body, or None."""
    return _check_types(body)


def check_update(body: Any, needed: str) -> Problem | None:
    """Say what the server would refuse in the body of a weight update, or None."""
    if not isinstance(body, dict) or needed not in body:
        return error(400, f"{needed}: Field required")
    return None
