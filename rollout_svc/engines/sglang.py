"""The SGLang dialect, spoken by SGLang 0.5 and by the built-in engine.

Invariants:

- Pure: bytes in, records out; no clock, no socket.
- A completion that is returned has as many logprobs as ids, each finite, each belonging to its id.
- The default of a key that matters is never relied on: `max_new_tokens` (128 there) and `abort_all_requests`
  (true there) are always sent.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, Literal

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Call, Completion, EngineInfo, GenerateRequest, Reply
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import FinishReason, VersionSpan

__all__ = ["SGLangDialect"]

_CAPABILITIES: Final = (*("abort", "abort_all", "count", "disk", "freeze_drop_kv", "freeze_keep_kv", "weight_version"),)
_OK: Final = 200
_SERVER_ERRORS: Final = 500
_CLIENT_ERRORS: Final = 400
# Statuses that speak of the worker (keys, route, load), not of the request.
_WORKER_STATUSES: Final = {401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "overloaded"}
_HARD_STATUSES: Final = frozenset({401, 403, 404})
_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
_DIGITS: Final = b"0123456789,"
_NUMBER_TYPES: Final = frozenset({int, float})
_LOGPROB_ROUNDING: Final = 1e-3  # a log of a probability may come out this much above 0, in half precision
_EXCERPT_CHARS: Final = 200  # of a foreign body, kept in an error message
_CACHED_SPANS: Final = 1024  # spans of whole answers: few lengths and fewer labels, of values that never change
_CACHED_SAMPLINGS: Final = 256  # distinct SamplingConfig objects whose encoding is kept


class SGLangDialect:
    """Builds and parses SGLang's HTTP calls."""

    name = "sglang"

    def __init__(self) -> None:
        self._params: dict[int, tuple[SamplingConfig, dict[str, Any]]] = {}

    # -- generation ------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> Call:
        """Build `POST /generate`: token ids in, token ids and logprobs out."""
        params = {**self._sampling_params(request.sampling), "max_new_tokens": request.max_tokens}
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        body = {
            **request.extra,
            "rid": request.request_id,
            "input_ids": request.input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }
        return Call("POST", "/generate", orjson.dumps(body))

    def _sampling_params(self, sampling: SamplingConfig) -> dict[str, Any]:
        known = self._params.get(id(sampling))
        if known is not None:
            return known[1]
        params: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k is not None:
            params["top_k"] = sampling.top_k
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        params.update({key: value for key, value in sampling.extra.items() if value not in (None, [], {}, "")})
        if len(self._params) >= _CACHED_SAMPLINGS:
            self._params.clear()
        self._params[id(sampling)] = (sampling, params)
        return params

    def parse_generate(self, reply: Reply) -> Completion:
        """Read the answer of `/generate`.

        Raises:
            WorkerFailure: 401, 403, 404, 429 or 5xx.
            SampleFailure: any other status, or a body that is not a valid completion.
        """
        if reply.status != _OK:
            raise _failure_of(reply)
        try:
            body = orjson.loads(reply.body)
            meta = body["meta_info"]
            ids = body["output_ids"]
            finish = meta["finish_reason"]["type"]
            pairs = meta["output_token_logprobs"]
            logprobs = [pair[0] for pair, token in zip(pairs, ids, strict=True) if pair[1] == token]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise SampleFailure("invalid_response", f"{type(error).__name__}: {error}: {_excerpt(reply)}") from error
        if not isinstance(finish, str) or finish not in _FINISH:
            raise SampleFailure("invalid_response", f"unknown finish reason {finish!r}")
        if len(logprobs) != len(ids):
            raise SampleFailure("invalid_response", "output_token_logprobs do not belong to output_ids")
        _check_numbers(ids, logprobs)
        return Completion(
            ids=ids,
            logprobs=logprobs,
            finish_reason=_FINISH[finish],
            engine_finish_reason=finish,
            spans=_spans(meta, len(ids)),
            request_id=meta.get("id"),
            labelled=meta.get("weight_version") is not None,
        )

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """One call aborts everything; by id, SGLang takes one id a call."""
        if request_ids is None:
            return [Call("POST", "/abort_request", b'{"abort_all":true}', admin=True)]
        return [
            Call("POST", "/abort_request", orjson.dumps({"rid": rid, "abort_all": False}), admin=True)
            for rid in request_ids
        ]

    def ping(self) -> Call:
        """`/ping` only: `/health` generates, and marks a paused server unhealthy."""
        return Call("GET", "/ping")

    def info(self) -> Call:
        """`/model_info` carries the weight label."""
        return Call("GET", "/model_info")

    def parse_info(self, reply: Reply) -> EngineInfo:
        """Read the weight label."""
        body = _control_body(reply)
        label = body.get("weight_version")
        return EngineInfo(
            weight_label=None if label is None else str(label),
            capabilities=_CAPABILITIES,
        )

    def loads(self) -> Call:
        """`/v1/loads`: one entry per data-parallel rank."""
        return Call("GET", "/v1/loads?include=core")

    def parse_loads(self, reply: Reply) -> int:
        """Sum running and waiting requests over the ranks."""
        body = _control_body(reply)
        try:
            counts = [rank[key] for rank in body["loads"] for key in ("num_running_reqs", "num_waiting_reqs")]
        except (KeyError, TypeError) as error:
            raise WorkerFailure("bad_loads", _excerpt(reply)) from error
        if not all(type(count) is int and count >= 0 for count in counts):  # one below 0 would hide a request
            raise WorkerFailure("bad_loads", _excerpt(reply))
        return sum(counts)

    def freeze(self, cache: Literal["keep", "drop"]) -> Call:
        """`/pause_generation`: `in_place` moves nothing, `retract` puts requests back into the queue without cache."""
        body = {"mode": "in_place" if cache == "keep" else "retract"}
        return Call("POST", "/pause_generation", orjson.dumps(body), admin=True)

    def thaw(self) -> Call:
        """`/continue_generation`; `torch_empty_cache` calls CUDA even where there is none."""
        return Call("POST", "/continue_generation", b'{"torch_empty_cache":false}', admin=True)

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> Call:
        """`/update_weights_from_disk`; it flushes the cache as well, which fails while a frozen batch keeps its own."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        return Call("POST", "/update_weights_from_disk", orjson.dumps(body), admin=True)

    def set_version(self, version: int) -> Call:
        """`/update_weight_version`, sparing the requests that run."""
        body = {"new_version": str(version), "abort_all_requests": False}
        return Call("POST", "/update_weight_version", orjson.dumps(body), admin=True)

    def flush_cache(self) -> Call:
        """`/flush_cache`; refused by the engine while it is busy."""
        return Call("POST", "/flush_cache", admin=True)

    def parse_done(self, reply: Reply) -> None:
        """200, and `success` not false."""
        if reply.status != _OK:
            raise WorkerFailure(f"http_{reply.status}", _excerpt(reply))
        if reply.body[:1] == b"{" and (body := _control_body(reply)).get("success") is False:
            raise WorkerFailure("refused", str(body.get("message", "")))


def _failure_of(reply: Reply) -> WorkerFailure | SampleFailure:
    status = reply.status
    if status in _WORKER_STATUSES or status >= _SERVER_ERRORS:
        kind = _WORKER_STATUSES.get(status, f"http_{status}")
        return WorkerFailure(
            kind, f"HTTP {status}: {_excerpt(reply)}", retry_after_s=reply.retry_after_s, hard=status in _HARD_STATUSES
        )
    if status >= _CLIENT_ERRORS:
        return SampleFailure("rejected_by_engine", f"HTTP {status}: {_excerpt(reply)}")
    return SampleFailure("invalid_response", f"HTTP {status}: {_excerpt(reply)}")


def _excerpt(reply: Reply) -> str:
    return reply.body[:_EXCERPT_CHARS].decode("utf-8", "replace")


def _control_body(reply: Reply) -> dict[str, Any]:
    if reply.status != _OK:
        raise WorkerFailure(_WORKER_STATUSES.get(reply.status, f"http_{reply.status}"), _excerpt(reply))
    try:
        body = orjson.loads(reply.body)
    except ValueError as error:
        raise WorkerFailure("bad_body", _excerpt(reply)) from error
    if not isinstance(body, dict):
        raise WorkerFailure("bad_body", _excerpt(reply))
    return body


def _check_numbers(ids: list[int], logprobs: list[float]) -> None:
    """Check types and ranges with loops that run in C and meet every element; JSON's booleans are no numbers."""
    try:
        # Integers >= 0 are written with digits alone; writing them is cheaper than looking at each.
        valid = orjson.dumps(ids).translate(None, _DIGITS) == b"[]" and (not logprobs or _are_logprobs(logprobs))
    except (OverflowError, TypeError):
        valid = False
    if not valid:
        raise SampleFailure("invalid_response", "ids must be integers >= 0 and logprobs finite numbers <= 0")


def _are_logprobs(values: list[float]) -> bool:
    largest = max(values)
    if not math.isfinite(sum(values)) or largest > _LOGPROB_ROUNDING:
        return False
    # What is no number could not be summed, save a boolean; true is too large, and false is not below 0.
    return largest < 0 or _NUMBER_TYPES.issuperset(map(type, values))


@lru_cache(maxsize=_CACHED_SPANS)
def _one_span(label: str | None, length: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(_version(label), 0, length),)


def _version(label: object) -> int | None:
    try:
        return int(str(label))
    except ValueError:
        return None


def _spans(meta: dict[str, Any], length: int) -> tuple[VersionSpan, ...]:
    """Normalise to spans that cover `[0, length)`; anything the engine says that does not is unknown (None)."""
    if length == 0:
        return ()
    reported = meta.get("weight_versions")
    if not reported:
        label = meta.get("weight_version")
        return _one_span(label if label is None else str(label), length)
    try:
        spans = tuple(VersionSpan(_version(s["version"]), int(s["start"]), int(s["end"])) for s in reported)
    except (KeyError, TypeError, ValueError):
        return (VersionSpan(None, 0, length),)
    spans = tuple(span for span in spans if span.end > span.start)
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != length or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        return (VersionSpan(None, 0, length),)
    return spans
