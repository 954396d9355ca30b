"""The SGLang dialect, spoken by SGLang 0.5 and by the built-in engine.

Invariants:

- Pure: bytes in, records out; no clock, no socket.
- A completion that is returned has as many logprobs as ids, each finite, each belonging to its id.
- The default of a key that matters is never relied on: `max_new_tokens` (128 there) and `abort_all_requests`
  (true there) are always sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Call, Completion, EngineInfo, EngineProfile, GenerateRequest, Health, Reply
from rollout_svc.engines.memory import TAGS, Asleep, Tag, in_order
from rollout_svc.engines.params import SamplingParams, extra_of, lift_of
from rollout_svc.engines.parsing import (
    OK,
    check_numbers,
    control_body,
    excerpt,
    failure_of,
    first_of,
    raw_experts,
    spans_of,
    version_of,
)
from rollout_svc.engines.sglang_stream import SGLangReader
from rollout_svc.engines.updates.protocol import WAYS, Way
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import FinishReason, VersionSpan
from rollout_svc.tensors.experts import Layout, RawExperts
from rollout_svc.tensors.layouts import layout_said

__all__ = ["SGLangDialect"]

_CAPABILITIES: Final = (
    *("abort", "abort_all", "count", "disk", "flush", "freeze_drop_kv", "freeze_keep_kv"),
    *("set_version", "stream", "weight_version"),
)
_WAYS: Final[tuple[Way, ...]] = ("cuda_ipc",)  # of every SGLang; the built-in engine says which it has
_EXPERTS: Final = "enable_return_routed_experts"  # of `/server_info`: every argument it was started with is there
_SAVER: Final = "enable_memory_saver"  # without it memory is not given up, and nobody is told
_BACKUP: Final = "enable_weights_cpu_backup"  # without it weights that were given up come back as anything
_UNHEALTHY: Final = 503
_REFUSAL_CHARS: Final = 2000  # of what an engine says of an update that it refuses
_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
_CACHED_SPANS: Final = 1024  # spans of whole answers: few lengths and fewer labels, of values that never change


class SGLangDialect:
    """Builds and parses SGLang's HTTP calls."""

    name = "sglang"

    def __init__(self) -> None:
        self._params = SamplingParams()

    # -- generation ------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Call:
        """Build `POST /generate`: token ids in, token ids and logprobs out."""
        params = {**self._params.of(request.sampling), "max_new_tokens": request.max_tokens}
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        body = {
            **extra_of(request),
            "rid": request.request_id,
            "input_ids": request.input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": stream,
        }
        if request.experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
        return Call("POST", "/generate", orjson.dumps(body), lift=lift_of(request, "base64"))

    def parse_generate(self, reply: Reply) -> Completion:
        """Read the answer of `/generate`.

        Raises:
            WorkerFailure: 401, 403, 404, 429 or 5xx.
            SampleFailure: any other status, or a body that is not a valid completion.
        """
        if reply.status != OK:
            raise failure_of(reply)
        try:
            body = orjson.loads(reply.body)
        except ValueError as error:
            raise SampleFailure("invalid_response", f"{error}: {excerpt(reply)}") from error
        return _completion(body)

    def reader(self) -> SGLangReader:
        """Read a stream, cumulative (its default) or of deltas (`--incremental-streaming-output`)."""
        return SGLangReader(_completion)

    def experts_of(self, lifted: Any, request: GenerateRequest) -> RawExperts | None:
        """Raw int32 of all hidden layers, from the token on that was asked for."""
        return raw_experts("int32", lifted, request.experts_from or 0)

    def refuses(self, sampling: SamplingConfig) -> str | None:  # noqa: ARG002 - all of it is there
        """SGLang has a word for every sampling setting."""
        return None

    # -- what it is ------------------------------------------------------------------------------------------

    def probe(self) -> tuple[Call, ...]:
        """`/model_info` is SGLang's alone; `/server_info` says more where it is there."""
        return Call("GET", "/model_info"), Call("GET", "/server_info")

    def parse_probe(self, replies: Sequence[Reply | WorkerFailure]) -> EngineProfile:
        """Recognise SGLang by the keys of `/model_info`."""
        first, second = replies
        if isinstance(first, WorkerFailure):
            raise first
        try:
            model = control_body(first)
        except WorkerFailure as failure:
            if failure.kind in ("not_found", "bad_body"):
                raise WorkerFailure("wrong_dialect", f"GET /model_info: {failure.message}") from failure
            raise
        if "weight_version" not in model:
            raise WorkerFailure("wrong_dialect", f"GET /model_info without weight_version: {excerpt(first)}")
        server: dict[str, Any] = {}
        if isinstance(second, Reply) and second.status == OK:
            server = control_body(second)
        label = model["weight_version"]
        return EngineProfile(
            dialect=self.name,
            engine_version=first_of(str, server.get("version")),
            capabilities=_CAPABILITIES + _more(server),
            logprobs="raw",
            model=first_of(str, model.get("model_path"), server.get("model_path")),
            tokenizer=first_of(str, model.get("tokenizer_path"), server.get("tokenizer_path")),
            vocab_size=first_of(int, model.get("vocab_size"), server.get("vocab_size")),
            context=first_of(int, server.get("context_length"), model.get("context_length")),
            max_running=first_of(int, server.get("max_running_requests")),
            weight_label=None if label is None else str(label),
            experts=_layout(server),
            ranks=max(first_of(int, server.get("tp_size")) or 1, 1),
        )

    def info(self) -> Call:
        """`/model_info` carries the weight label."""
        return Call("GET", "/model_info")

    def parse_info(self, reply: Reply) -> EngineInfo:
        """Read the weight label."""
        return EngineInfo.labelled(control_body(reply).get("weight_version"))

    def ping(self) -> Call:
        """`/ping` only: `/health` generates, and marks a paused server unhealthy."""
        return Call("GET", "/ping")

    def parse_ping(self, reply: Reply) -> Health:
        """503 is a flag that somebody's `/health` sets and only its next one takes back: there, but in doubt."""
        return Health(alive=True, ready=reply.status != _UNHEALTHY, reason=f"GET /ping: HTTP {reply.status}")

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """One call aborts everything; by id, SGLang takes one id a call."""
        if request_ids is None:
            return [Call("POST", "/abort_request", b'{"abort_all":true}', admin=True)]
        return [
            Call("POST", "/abort_request", orjson.dumps({"rid": rid, "abort_all": False}), admin=True)
            for rid in request_ids
        ]

    def loads(self) -> Call:
        """`/v1/loads`: one entry per data-parallel rank."""
        return Call("GET", "/v1/loads?include=core")

    def parse_loads(self, reply: Reply) -> int:
        """Sum running and waiting requests over the ranks."""
        body = control_body(reply)
        try:
            counts = [rank[key] for rank in body["loads"] for key in ("num_running_reqs", "num_waiting_reqs")]
        except (KeyError, TypeError) as error:
            raise WorkerFailure("bad_loads", excerpt(reply)) from error
        if not all(type(count) is int and count >= 0 for count in counts):  # one below 0 would hide a request
            raise WorkerFailure("bad_loads", excerpt(reply))
        return sum(counts)

    def freeze(self, cache: Literal["keep", "drop"]) -> list[Call]:
        """`/pause_generation`: `in_place` moves nothing, `retract` puts requests back into the queue without cache."""
        body = {"mode": "in_place" if cache == "keep" else "retract"}
        return [Call("POST", "/pause_generation", orjson.dumps(body), admin=True)]

    def thaw(self) -> list[Call]:
        """`/continue_generation`; `torch_empty_cache` calls CUDA even where there is none."""
        return [Call("POST", "/continue_generation", b'{"torch_empty_cache":false}', admin=True)]

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> list[Call]:
        """`/update_weights_from_disk`; it flushes the cache as well, which fails while a frozen batch keeps its own."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        return [Call("POST", "/update_weights_from_disk", orjson.dumps(body), admin=True)]

    def forget_load(self, version: int) -> list[Call]:  # noqa: ARG002
        """None: a load that begins has nothing of the one before."""
        return []

    def set_version(self, version: int) -> list[Call]:
        """`/update_weight_version`, sparing the requests that run."""
        body = {"new_version": str(version), "abort_all_requests": False}
        return [Call("POST", "/update_weight_version", orjson.dumps(body), admin=True)]

    def flush_cache(self) -> list[Call]:
        """`/flush_cache`; refused by the engine while it is busy."""
        return [Call("POST", "/flush_cache", admin=True)]

    def offloads(self, tags: frozenset[Tag]) -> frozenset[Tag]:
        """Each for itself."""
        return tags

    def offload(self, tags: frozenset[Tag]) -> list[Call]:
        """`/release_memory_occupation`: the server dies of it where anything runs, or is given up already."""
        return [Call("POST", "/release_memory_occupation", orjson.dumps({"tags": in_order(tags)}), admin=True)]

    def wake(self, tag: Tag) -> list[Call]:
        """`/resume_memory_occupation`: the server dies of a tag that was not given up."""
        return [Call("POST", "/resume_memory_occupation", orjson.dumps({"tags": [tag]}), admin=True)]

    def asleep(self) -> Call:
        """`/server_info`, where the built-in engine says what is given up."""
        return Call("GET", "/server_info")

    def parse_asleep(self, reply: Reply) -> Asleep | None:
        """Read it; SGLang itself does not tell."""
        released = control_body(reply).get("released_memory")
        if not isinstance(released, list):
            return None
        return Asleep(frozenset(tag for tag in TAGS if tag in released), kept=True)

    def parse_done(self, reply: Reply) -> None:
        """200, and `success` not false; an update that is refused says why in `message`, which may be a list."""
        if reply.status != OK:
            raise WorkerFailure(f"http_{reply.status}", _refusal(reply))
        if reply.body[:1] == b"{" and (body := control_body(reply)).get("success") is False:
            raise WorkerFailure("refused", str(body.get("message", "")))


def _refusal(reply: Reply) -> str:
    try:
        body = orjson.loads(reply.body)
    except ValueError:
        return excerpt(reply)
    message = body.get("message") if isinstance(body, dict) and "success" in body else None
    return message[:_REFUSAL_CHARS] if isinstance(message, str) else excerpt(reply)


def _more(server: dict[str, Any]) -> tuple[str, ...]:
    """What it was started with; the built-in engine says itself by which ways it takes weights."""
    transports = server.get("weight_transports")
    ways: tuple[str, ...]
    if isinstance(transports, list):
        ways = tuple(way for way in WAYS if way in transports)
    else:
        ways = (*_WAYS, *("distributed",) * (server.get("dp_size") == 1))  # no group with data-parallel ranks
    saver = ("offload", "offload_kv") * (server.get(_SAVER) is True)
    backup = ("weights_backup",) * (bool(saver) and server.get(_BACKUP) is True)
    return ("experts",) * (server.get(_EXPERTS) is True) + ways + saver + backup


def _completion(body: Any) -> Completion:
    """Read one answer; raises SampleFailure for a body that is not a valid completion."""
    try:
        meta = body["meta_info"]
        ids = body["output_ids"]
        finish = meta["finish_reason"]["type"]
        pairs = meta["output_token_logprobs"]
        logprobs = [pair[0] for pair, token in zip(pairs, ids, strict=True) if pair[1] == token]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SampleFailure("invalid_response", f"{type(error).__name__}: {error}: {_shown(body)}") from error
    if not isinstance(finish, str) or finish not in _FINISH:
        raise SampleFailure("invalid_response", f"unknown finish reason {finish!r:.100}")
    if len(logprobs) != len(ids):
        raise SampleFailure("invalid_response", "output_token_logprobs do not belong to output_ids")
    check_numbers(ids, logprobs)
    return Completion(
        ids=ids,
        logprobs=logprobs,
        finish_reason=_FINISH[finish],
        engine_finish_reason=finish,
        spans=_spans(meta, len(ids)),
        request_id=meta.get("id"),
        labelled=meta.get("weight_version") is not None,
    )


def _layout(server: dict[str, Any]) -> Layout | None:
    """The routing of its model, where `/server_info` tells: the built-in engine's does, SGLang's own does not."""
    return layout_said(*(server.get(key) for key in ("num_experts", "top_k", "layers", "moe_layers")))


def _shown(body: object) -> str:
    return excerpt(Reply(OK, repr(body).encode()))


@lru_cache(maxsize=_CACHED_SPANS)
def _one_span(label: str | None, length: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version_of(label), 0, length),)


def _spans(meta: dict[str, Any], length: int) -> tuple[VersionSpan, ...]:
    """Normalise to spans that cover `[0, length)`; anything the engine says that does not is unknown (None)."""
    if length == 0:
        return ()
    reported = meta.get("weight_versions")
    if not reported:
        label = meta.get("weight_version")
        return _one_span(label if label is None else str(label), length)
    return spans_of(reported, length)
