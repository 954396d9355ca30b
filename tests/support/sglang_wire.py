"""The shapes of the SGLang dialect as an engine writes them: pure functions, no state.

- Key order is the engine's own, so that a recorded answer can be compared as text.
- A validation failure is a `(status, payload)` pair, never an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.routing import Routing

__all__ = [
    "CACHE_FLUSHED",
    "FLUSH_FAILED",
    "PAUSE_MODES",
    "SAMPLING_KEYS",
    "SENT_AT",
    "UNAUTHORIZED",
    "Problem",
    "Reply",
    "check_abort",
    "check_generate",
    "check_pause",
    "generation",
    "invalid",
    "loads",
    "model_info",
    "schema_error",
    "server_info",
    "tokens_of",
]

Finish = Literal["stop", "length", "abort", "abort-queued"]
Problem = tuple[int, Any]

SENT_AT = 1795220741.89
"""`response_sent_to_client_ts` of every answer: constant, so that bodies compare equal."""
FIRST_ID = 101
"""Generated ids count up from here: position i of an answer is `FIRST_ID + i`."""
LOGPROB = -1.5
"""Log-probability of every generated id that a test did not set."""
PAUSE_MODES = ("abort", "retract", "in_place")
UNAUTHORIZED = {"error": "Unauthorized"}
CACHE_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
FLUSH_FAILED = "Flush cache failed.\n"
SAMPLING_KEYS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
    "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
"""What `sampling_params` may hold, in the order the engine lists it; anything else is a 400."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one generation came to.

    Attributes:
        tokens: how many ids (counted up from `FIRST_ID`) or the ids themselves; None: as the finish reason needs
            (`length`: the request's `max_new_tokens`; else 4, or fewer where the request asks for fewer).
        finish: `stop`, `length`, `abort` (while running) or `abort-queued` (in the waiting queue: fewer fields).
        logprobs: one float per id; None: `LOGPROB` for each.
        weight_version: label to report; None: the engine's current one.
        weight_versions: spans `{"version", "start", "end"}` to report; None: whatever the engine tracked.
        meta: further `meta_info` fields, written last.
    """

    tokens: int | Sequence[int] | None = None
    finish: Finish = "stop"
    logprobs: Sequence[float] | None = None
    weight_version: str | None = None
    weight_versions: Sequence[Mapping[str, Any]] | None = None
    meta: Mapping[str, Any] | None = None

    def ids(self, max_new_tokens: int) -> list[int]:
        """The generated ids, given the request's budget."""
        if self.tokens is None:
            return tokens_of(max_new_tokens if self.finish == "length" else min(4, max_new_tokens))
        return tokens_of(self.tokens) if isinstance(self.tokens, int) else list(self.tokens)


def tokens_of(count: int) -> list[int]:
    """The first `count` generated ids."""
    return list(range(FIRST_ID, FIRST_ID + count))


def _finish_reason(finish: Finish, ids: Sequence[int]) -> dict[str, Any]:
    match finish:
        case "stop":
            return {"type": "stop", "matched": ids[-1] if ids else None}
        case "length":
            return {"type": "length", "length": len(ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "abort-queued":
            return {"type": "abort", "message": "Abort in waiting queue"}


def generation(
    rid: str,
    reply: Reply,
    *,
    body: Mapping[str, Any],
    max_new_tokens: int,
    version: str,
    unfinished: bool = False,
    routing: Routing | None = None,
) -> dict[str, Any]:
    """Build one `/generate` answer.

    Args:
        rid: the request id.
        reply: what the generation came to.
        body: the request, for its prompt length and its logprob switch.
        max_new_tokens: its budget.
        version: the engine's weight label now.
        unfinished: a chunk of a stream before its last: finish reason null.
        routing: of its model, where it was started to return that.
    """
    ids = reply.ids(max_new_tokens)
    queued = reply.finish == "abort-queued"
    meta: dict[str, Any] = {"id": rid, "finish_reason": None if unfinished else _finish_reason(reply.finish, ids)}
    if not queued:
        meta["prompt_tokens"] = len(body["input_ids"])
    meta["weight_version"] = version if reply.weight_version is None else reply.weight_version
    if not queued:
        meta["num_retractions"] = 0
    if body.get("return_logprob"):
        logprobs = [LOGPROB] * len(ids) if reply.logprobs is None else list(reply.logprobs)
        if not queued:
            meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
    if not queued:
        meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(ids)
    if not queued:
        meta["cached_tokens"] = 0
        if not unfinished:
            meta["e2e_latency"] = 0.035
        meta["response_sent_to_client_ts"] = SENT_AT
    if reply.weight_versions is not None:
        meta["weight_versions"] = [dict(span) for span in reply.weight_versions]
    if routing is not None and body.get("return_routed_experts") and not (queued or unfinished):
        meta["routed_experts"] = routing.int32([*body["input_ids"], *ids], body.get("routed_experts_start_len") or 0)
    meta.update(reply.meta or {})
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}


def loads(running: int, waiting: int, *, max_running: int, version: str) -> dict[str, Any]:
    """Build a `/v1/loads` answer of one data-parallel rank, `core` and `queues` sections."""
    rank = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": 0,
        "num_total_tokens": 0,
        "max_total_num_tokens": 1 << 20,
        "max_running_requests": max_running,
        "token_usage": 0.0,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0},
    }
    return {
        "timestamp": "2026-09-01T00:00:00+00:00",
        "version": version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [rank],
    }


def model_info(model_path: str, weight_version: str) -> dict[str, Any]:
    """Build a `/model_info` answer."""
    return {
        "model_path": model_path,
        "served_model_name": model_path,
        "tokenizer_path": model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def server_info(
    model_path: str, *, version: str, context: int, max_running: int, experts: bool = False
) -> dict[str, Any]:
    """Build a `/server_info` answer: the fields a client plans by."""
    return {
        "model_path": model_path,
        "served_model_name": model_path,
        "context_length": context,
        "max_running_requests": max_running,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "enable_return_routed_experts": experts,
        "version": version,
        "internal_states": [{"max_running_requests": max_running}],
    }


def invalid(message: str) -> Problem:
    """A value the engine refuses."""
    return 400, {"error": {"message": message}}


def schema_error(*errors: Mapping[str, Any]) -> Problem:
    """A body of the wrong shape, worded as the engine words it."""
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}"
    lines = "".join(f"\n  {dict(error)}" for error in errors)
    return 400, {"object": "error", "message": f"{count}:{lines}", "type": "Bad Request", "param": None, "code": 400}


def _wrong_type(field: str, kind: str, value: Any) -> dict[str, Any]:
    return {"type": f"{kind}_type", "loc": ("body", field), "msg": f"Input should be a valid {kind}", "input": value}


def check_generate(body: Any, *, context: int) -> Problem | None:
    """Say what the engine would refuse in a `/generate` body, or None."""
    if not isinstance(body, dict):
        return schema_error({"type": "missing", "loc": ("body",), "msg": "Field required", "input": body})
    rid, ids, sampling = body.get("rid"), body.get("input_ids"), body.get("sampling_params") or {}
    if rid is not None and not isinstance(rid, str):
        return schema_error(_wrong_type("rid", "string", rid), _wrong_type("rid", "list", rid))
    if ids is not None and not isinstance(ids, list):
        return schema_error(
            {
                "type": "value_error",
                "loc": ("body", "input_ids"),
                "msg": f"Value error, must be list or null; got {type(ids).__name__}",
                "input": ids,
            }
        )
    if not isinstance(sampling, dict):
        return schema_error(_wrong_type("sampling_params", "dict", sampling))
    unknown = next((key for key in sampling if key not in SAMPLING_KEYS), None)
    if unknown is not None:
        expected = ", ".join(f"`{key}`" for key in SAMPLING_KEYS)
        return 400, {"error": f"unknown field `{unknown}`, expected one of {expected}"}
    return _check_values(ids, sampling, context) or _check_start(body, ids)


def _check_start(body: Mapping[str, Any], ids: list[Any] | None) -> Problem | None:
    start, prompt = body.get("routed_experts_start_len") or 0, len(ids or ())
    if not 0 <= start <= prompt:
        return invalid(f"routed_experts_start_len must be in [0, {prompt}], got {start}.")
    return None


def _check_values(ids: list[Any] | None, sampling: Mapping[str, Any], context: int) -> Problem | None:
    if not ids:
        return invalid("Either text, input_ids or input_embeds should be provided.")
    if not all(isinstance(token, int) for token in ids):
        return invalid("Batches of prompts are not imitated.")
    if len(ids) > context:
        size = f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        return invalid(size)
    temperature, top_p = sampling.get("temperature", 1.0), sampling.get("top_p", 1.0)
    if temperature < 0:
        return invalid(f"temperature must be a non-negative finite number, got {temperature}.")
    if not 0.0 < top_p <= 1.0:
        return invalid(f"top_p must be in (0, 1], got {top_p}.")
    return None


def check_abort(body: Any) -> Problem | None:
    """Say what the engine would refuse in an `/abort_request` body, or None."""
    if not isinstance(body, dict):
        return schema_error({"type": "missing", "loc": ("body",), "msg": "Field required", "input": body})
    every, rid = body.get("abort_all", False), body.get("rid", "")
    if not isinstance(every, bool):
        return schema_error(
            {
                "type": "bool_parsing",
                "loc": ("body", "abort_all"),
                "msg": "Input should be a valid boolean, unable to interpret input",
                "input": every,
            }
        )
    if not isinstance(rid, str):
        return schema_error(_wrong_type("rid", "string", rid))
    return None


def check_pause(body: Any) -> Problem | None:
    """Say what the engine would refuse in a `/pause_generation` body, or None."""
    if not isinstance(body, dict):
        return schema_error({"type": "missing", "loc": ("body",), "msg": "Field required", "input": body})
    mode = body.get("mode", "abort")
    if mode not in PAUSE_MODES:
        return schema_error(
            {
                "type": "literal_error",
                "loc": ("body", "mode"),
                "msg": "Input should be 'abort', 'retract' or 'in_place'",
                "input": mode,
            }
        )
    return None
