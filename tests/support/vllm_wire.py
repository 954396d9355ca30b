"""The shapes of the vLLM dialect as an engine writes them: pure functions, no state.

- Key order is the engine's own, so that a recorded answer can be compared as text.
- A validation failure is a `(status, payload)` pair, never an exception.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tests.support.sglang_wire import LOGPROB, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.support.routing import Routing

__all__ = [
    "CORE_DEAD",
    "DEV_ROUTES",
    "GUARDED",
    "ID_PREFIX",
    "MANGLES",
    "NOT_FOUND",
    "PAUSE_MODES",
    "SCALE_OUT_OFF",
    "UNAUTHORIZED",
    "budget",
    "check_generate",
    "choices",
    "chunk",
    "error",
    "generation",
    "invalid",
    "metrics",
    "models",
    "rpc_failed",
    "server_info",
]

Problem = tuple[int, Any]

CREATED = 1795221010
"""`created` of every answer, seconds since 1970: constant, so that bodies compare equal."""
ID_PREFIX = "generate-tokens-"
UNAUTHORIZED = {"error": "Unauthorized"}
NOT_FOUND = {"detail": "Not Found"}
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths that a key guards; every other route is open."""
DEV_ROUTES = frozenset(
    {
        *("/pause", "/resume", "/is_paused", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping"),
        *("/collective_rpc", "/server_info", "/reset_prefix_cache", "/update_weight_version", "/weight_info"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    }
)
"""What comes with the development mode, as far as it is imitated."""
PAUSE_MODES = ("abort", "wait", "keep")
NO_LOGPROB = -9999.0
"""What NaN and -infinity are written as."""


def error(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """Build the envelope of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


CORE_DEAD = error(
    "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError", 500
)
SCALE_OUT_OFF = error(
    "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
    "PermissionDeniedError",
    403,
)


def rpc_failed(trouble: str) -> dict[str, Any]:
    """Build the body of a worker method that raised."""
    message = (
        f"Call to collective_rpc method failed: Worker failed with error '{trouble}', "
        "please check the stack trace above for the root cause"
    )
    return error(message, "InternalServerError", 500)


def invalid(*problems: Mapping[str, Any]) -> Problem:
    """Build what pydantic's validation answers, as the engine words it."""
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    message = f"{count}:" + "".join(f"\n  {dict(problem)}" for problem in problems)
    return 400, error(message, "Bad Request", 400, problems[0]["loc"])


def check_generate(body: Any, *, model: str, context: int, vocabulary: int, slots: int) -> Problem | None:
    """Say what the engine would refuse in a `/inference/v1/generate` body, or None."""
    if not isinstance(body, dict):
        return invalid({"type": "missing", "loc": "body", "msg": "Field required", "input": repr(body)})
    missing = [key for key in ("token_ids", "sampling_params") if key not in body]
    if missing:
        lacks = ({"type": "missing", "loc": f"body.{key}", "msg": "Field required", "input": "{}"} for key in missing)
        return invalid(*lacks)
    ids, sampling = body["token_ids"], body["sampling_params"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        return invalid({"type": "list_type", "loc": "body.token_ids", "msg": "Input should be a valid list"})
    if not ids:
        size = {"field_type": "List", "min_length": 1, "actual_length": 0}
        text = "List should have at least 1 item after validation, not 0"
        return invalid(
            {"type": "too_short", "loc": "body.token_ids", "msg": text, "input": "<list of 0 items>", "ctx": size}
        )
    if not isinstance(sampling, dict):
        return invalid({"type": "dataclass_type", "loc": "body.sampling_params", "msg": "Input should be an object"})
    return _check_values(body, ids, sampling, model, context, vocabulary, slots)


def _check_values(
    body: Mapping[str, Any],
    ids: Sequence[int],
    sampling: Mapping[str, Any],
    model: str,
    context: int,
    vocabulary: int,
    slots: int,
) -> Problem | None:
    def bad(message: str) -> Problem:
        return 400, error(message, "BadRequestError", 400)

    if body.get("model") not in (None, model):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {model}."
        return 404, error(message, "NotFoundError", 404, "model")
    if (outside := next((token for token in ids if not 0 <= token < vocabulary), None)) is not None:
        return bad(f"Token id {outside} is out of vocabulary")
    if len(ids) >= context:
        return bad(f"This model's maximum context length is {context} tokens, but the prompt has {len(ids)}.")
    if sampling.get("max_tokens", 1) < 1:
        return bad(f"max_tokens must be at least 1, got {sampling['max_tokens']}.")
    if not 0.0 < sampling.get("top_p", 1.0) <= 1.0:
        return bad(f"top_p must be in (0, 1], got {sampling['top_p']}.")
    if sampling.get("temperature", 1.0) < 0:
        return bad(f"temperature must be non-negative, got {sampling['temperature']}.")
    if sampling.get("n", 1) > slots:
        return bad(f"sampling_params.n must be at most the server's max_num_seqs ({slots}), got {sampling['n']}.")
    return None


def budget(body: Mapping[str, Any], context: int) -> int:
    """How many tokens a request may generate: what it says, else the rest of the context, which bounds it anyway."""
    rest = context - len(body["token_ids"])
    said = body["sampling_params"].get("max_tokens")
    return rest if said is None else min(said, rest)


def _content(ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    content = []
    for token, value in zip(ids, logprobs, strict=True):
        written = value if math.isfinite(value) else NO_LOGPROB
        entry = {"token_id": token, "logprob": written, "rank": 1}
        content.append({**entry, "top_logprobs": [dict(entry)]})
    return {"content": content}


def choices(
    body: Mapping[str, Any],
    reply: Reply,
    ids: Sequence[int],
    *,
    first: int = 0,
    versions: Sequence[Mapping[str, Any]] | None,
    unfinished: bool = False,
    routing: Routing | None = None,
) -> list[dict[str, Any]]:
    """Build the choices of an answer or of a chunk: one for each of `n`, all alike.

    Args:
        body: the request.
        reply: what the generation came to.
        ids: all its ids.
        first: the first id this chunk tells.
        versions: spans over all ids; None in a chunk that is not the last.
        unfinished: a chunk that is not the last.
        routing: of its model, where it was started to return that: it does so whether or not it is asked.
    """
    sampling = body["sampling_params"]
    logprobs = [LOGPROB] * len(ids) if reply.logprobs is None else list(reply.logprobs)
    tokens, start = [*body["token_ids"], *ids], sampling.get("routed_experts_prompt_start", 0)
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": None if unfinished else reply.finish,
        "stop_reason": None,
        "token_ids": list(ids[first:]),
        "routed_experts": None if routing is None or unfinished or not ids else routing.npy(tokens, start),
        "sampling_mask": None,
        "weight_versions": None if versions is None else [dict(span) for span in versions],
        "logprobs": None if sampling.get("logprobs") is None else _content(ids[first:], logprobs[first:]),
    }
    return [{**choice, "index": index} for index in range(sampling.get("n", 1))]


def generation(
    request_id: str, model: str, body: Mapping[str, Any], found: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Build a whole answer around its choices."""
    prompt, made = len(body["token_ids"]), sum(len(choice["token_ids"]) for choice in found)
    return {
        "request_id": request_id,
        "model": model,
        "created": CREATED,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": list(body["token_ids"]) if body.get("return_token_ids") else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": list(found),
    }


def chunk(request_id: str, found: Sequence[Mapping[str, Any]], usage: tuple[int, int] | None = None) -> dict[str, Any]:
    """Build one payload of a stream; `usage`: prompt and completion tokens, in the one without choices."""
    payload: dict[str, Any] = {"request_id": request_id, "usage": None, "output_mode": "tokens", "choices": list(found)}
    if usage is not None:
        prompt, made = usage
        payload["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
    return payload


def models(model: str, root: str, context: int) -> dict[str, Any]:
    """Build a `/v1/models` answer: the fields a client plans by."""
    card = {"id": model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": root, "parent": None}
    return {"object": "list", "data": [{**card, "max_model_len": context, "permission": []}]}


def server_info(
    model: str,
    context: int,
    *,
    logprobs_mode: str,
    slots: int,
    processes: int,
    experts: bool = False,
    transfer: str | None = None,
    sleep_mode: bool = False,
) -> dict[str, Any]:
    """Build a `/server_info?config_format=json` answer: the fields a client plans by."""
    told = {"model": model, "tokenizer": model, "max_model_len": context, "logprobs_mode": logprobs_mode}
    return {
        "vllm_config": {
            "model_config": {
                **told,
                "served_model_name": model,
                "skip_tokenizer_init": False,
                "enable_sleep_mode": sleep_mode,
            },
            "scheduler_config": {"max_num_seqs": slots, "policy": "fcfs"},
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1, "_api_process_count": processes},
            "aux_output_config": {"enable_return_routed_experts": experts},
            "weight_transfer_config": None if transfer is None else {"backend": transfer},
        },
        "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": transfer is not None},
        "system_env": {},
    }


def metrics(model: str, running: int, waiting: int, preemptions: int) -> str:
    """Build the part of `/metrics` that tells the load."""
    labels = f'{{engine="0",model_name="{model}"}}'
    reason = f'{{engine="0",model_name="{model}",reason="capacity"}}'
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{labels} {float(running)}\n"
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
        "# TYPE vllm:num_requests_waiting gauge\n"
        f"vllm:num_requests_waiting{labels} {float(waiting)}\n"
        "# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.\n"
        "# TYPE vllm:num_requests_waiting_by_reason gauge\n"
        f"vllm:num_requests_waiting_by_reason{reason} {float(waiting)}\n"
        "# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.\n"
        "# TYPE vllm:num_preemptions_total counter\n"
        f"vllm:num_preemptions_total{labels} {float(preemptions)}\n"
    )


def _choice(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["choices"][0].update(fields)


def _entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["choices"][0]["logprobs"]["content"][0].update(fields)


MANGLES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "no choices": lambda body: body.pop("choices"),
    "empty choices": lambda body: body.update(choices=[]),
    "two choices": lambda body: body["choices"].append(body["choices"][0]),
    "no token_ids": lambda body: body["choices"][0].pop("token_ids"),
    "no logprobs": _choice(logprobs=None),
    "null finish_reason": _choice(finish_reason=None),
    "odd finish_reason": _choice(finish_reason="weather"),
    "ids null": _choice(token_ids=None),
    "ids short": lambda body: body["choices"][0]["token_ids"].pop(),
    "ids long": lambda body: body["choices"][0]["token_ids"].append(7),
    "negative id": lambda body: body["choices"][0]["token_ids"].__setitem__(0, -1),
    "logprobs short": lambda body: body["choices"][0]["logprobs"]["content"].pop(),
    "logprobs of other ids": _entry(token_id=9),
    "logprob is NaN": _entry(logprob=math.nan),
    "logprob stands for NaN": _entry(logprob=NO_LOGPROB),
    "logprob is null": _entry(logprob=None),
    "logprob is text": _entry(logprob="-1.5"),
    "logprob is positive": _entry(logprob=1.5),
    "other id": lambda body: body.update(request_id="generate-tokens-somebody-else"),
}
"""Ways to make a good answer wrong, by name; each changes the decoded body in place."""
