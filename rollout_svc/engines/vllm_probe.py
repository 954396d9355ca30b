"""What a vLLM server turns out to be when a worker is registered: its switches, its limits, its gauges.

Invariants:

- Pure: the calls to make, and what their answers mean. Nothing probed generates, aborts or changes anything.
- A capability is one whose route was seen: `/openapi.json` lists them; where it is off, the routes come in two sets,
  each behind its switch, and one of each was called.
- What an engine is refused for is named with the switch that mends it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call, EngineProfile, LogprobMeaning, Reply
from rollout_svc.engines.parsing import OK, control_body, excerpt
from rollout_svc.errors import WorkerFailure

__all__ = ["ABORT", "PROBE", "gauges_of", "profile_of"]

ABORT: Final = "/inference/v1/abort_requests"
"""Aborts by id; comes with `/inference/v1/generate`, behind the same switch and the same key."""
PROBE: Final = (
    Call("GET", "/version"),
    Call("GET", "/v1/models"),
    # No request has this id, since a wire id is 32 hex characters; the list must not be empty (see `vllm.py`).
    Call("POST", ABORT, b'{"request_ids":["generate-tokens-probe"]}'),
    Call("GET", "/weight_info", admin=True),
    Call("GET", "/openapi.json"),
    Call("GET", "/metrics"),
    Call("GET", "/server_info?config_format=json", admin=True),
)
"""The calls of a probe, in the order `profile_of` takes their answers."""
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_DEV_MODE: Final = "VLLM_SERVER_DEV_MODE=1"
_SCALE_OUT: Final = "--enable-scale-out"
# What each capability needs, of the routes that come with the development mode.
_NEEDS: Final[dict[str, frozenset[str]]] = {
    "abort_all": frozenset({"/abort_requests"}),
    "disk": frozenset({"/collective_rpc", "/update_weight_version"}),
    "flush": frozenset({"/reset_prefix_cache"}),
    "freeze_drop_kv": frozenset({"/pause", "/resume"}),
    "freeze_keep_kv": frozenset({"/pause", "/resume"}),
    "set_version": frozenset({"/update_weight_version"}),
    "weight_version": frozenset({"/weight_info", "/update_weight_version"}),
}
_TRANSFER: Final = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)
_WAYS: Final = {"ipc": "cuda_ipc", "nccl": "distributed"}
"""By the backend of its weight transfer."""
_UNPICKLES: Final = "VLLM_ALLOW_INSECURE_SERIALIZATION"  # what is sent for `ipc` is a pickle, by its own protocol
_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_SLEEP: Final = frozenset({"/sleep", "/wake_up", "/is_sleeping"})
_RELEASE: Final = "/release_kv_cache_memory"
_EXPERTS_IN: Final = ("aux_output_config", "model_config")  # the switch has moved between versions
_GAUGES: Final = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^\n]*\})? (\S+)", re.MULTILINE)

Answer = Reply | WorkerFailure


def profile_of(answers: Sequence[Answer]) -> EngineProfile:
    """Read the answers to `PROBE`.

    Raises:
        WorkerFailure: `wrong_dialect` for another engine; `unfit` where a switch is off, naming it; what came instead
            of an answer where that says nothing of the engine (connection, key).
    """
    version, models, abort, label, *rest = answers
    engine_version = _version(version)
    model = _model(models)
    _check_scale_out(abort, engine_version)
    weights = _weights(label)
    openapi, metrics, info = map(_answered, rest)  # one that was late is asked again: what it tells lasts
    config = _config(info)
    logprobs, doubts = _logprobs(config)
    warnings = list(doubts)
    if weights is None:
        warnings.append(f"vLLM runs without {_DEV_MODE}: it cannot be frozen, take weights or say which it has")
    processes = _count(_at(config, "parallel_config", "_api_process_count")) or 1
    if processes > 1:
        warnings.append(f"{processes} API processes: an abort reaches only one (--api-server-count 1 mends that)")
    capabilities = {"abort", "stream"}
    paths = _paths(openapi)
    if weights is not None:
        capabilities |= {name for name, needed in _NEEDS.items() if paths is None or needed <= paths}
        capabilities |= _ways(info, paths, warnings)
    if processes > 1:
        capabilities.discard("abort_all")
    if metrics.status == OK and gauges_of(metrics.body) is not None:
        capabilities.add("count")
    else:
        warnings.append("/metrics shows no vllm:num_requests_* gauges (--disable-log-stats?): it cannot count")
    if weights is not None and _at(config, "model_config", "enable_sleep_mode") is True:
        capabilities |= _sleep_of(_paths(openapi))
    if any(_at(config, section, "enable_return_routed_experts") is True for section in _EXPERTS_IN):
        capabilities.add("experts")
    return EngineProfile(
        dialect="vllm",
        engine_version=engine_version,
        capabilities=tuple(sorted(capabilities)),
        logprobs=logprobs,
        model=_text(model.get("id")),
        tokenizer=_text(_at(config, "model_config", "tokenizer")),
        vocab_size=None,  # it does not tell
        context=_count(model.get("max_model_len")),
        max_running=_count(_at(config, "scheduler_config", "max_num_seqs")),
        weight_label=None if weights is None else _text(weights.get("weight_version")),
        warnings=tuple(warnings),
        ranks=math.prod(_count(_at(config, "parallel_config", size)) or 1 for size in _PARALLEL),
    )


def _ways(info: Reply, paths: frozenset[str] | None, warnings: list[str]) -> set[str]:
    """By which way it takes weights, as it was started; what keeps it from one is added to the warnings."""
    backend = _at(_config(info), "weight_transfer_config", "backend")
    if backend not in _WAYS or not (paths is None or paths >= _TRANSFER):
        return set()
    if backend == "ipc" and _at(_object(info), "vllm_env", _UNPICKLES) is False:
        warnings.append(f"its weight transfer is ipc, and it runs without {_UNPICKLES}=1: it would refuse what is sent")
        return set()
    return {_WAYS[backend]}


def gauges_of(body: bytes) -> int | None:
    """Running and waiting requests by the gauges of `/metrics`, over all its engines; None where one is missing.

    They show the engine's last step: while it is paused it takes none, and they say nothing of what arrives.
    """
    found = _GAUGES.findall(body)
    if {name for name, _ in found} != {b"running", b"waiting"}:
        return None
    total = 0
    for _, text in found:
        try:
            value = float(text)
        except ValueError:
            return None
        if not value.is_integer() or value < 0:  # nan and inf are no integers; one below 0 would hide a request
            return None
        total += int(value)
    return total


def _sleep_of(paths: frozenset[str] | None) -> set[str]:
    """What sleep mode comes to; whether the cache can go alone is only believed where its route was seen."""
    if paths is not None and not paths >= _SLEEP:
        return set()
    alone = {"offload_kv"} if paths is not None and _RELEASE in paths else set()
    return {"offload", "weights_backup"} | alone


def _answered(answer: Answer) -> Reply:
    if isinstance(answer, WorkerFailure):
        raise answer
    return answer


def _version(answer: Answer) -> str:
    """`/version` is never guarded: whatever else it answers, this is no vLLM."""
    reply = _answered(answer)
    try:
        version = orjson.loads(reply.body)["version"]
    except (ValueError, KeyError, TypeError):
        version = None
    if reply.status != OK or not isinstance(version, str):
        raise WorkerFailure("wrong_dialect", f"GET /version answered {_quoted(reply)}")
    return version


def _model(answer: Answer) -> dict[str, Any]:
    """Read the base model; adapters have a parent."""
    reply = _answered(answer)
    if reply.status == _UNAUTHORIZED:
        raise WorkerFailure("unauthorized", f"GET /v1/models answered {_quoted(reply)}", hard=True)
    try:
        found = orjson.loads(reply.body)["data"]
        model: dict[str, Any] = next(card for card in found if card.get("parent") is None)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise WorkerFailure("wrong_dialect", f"GET /v1/models answered {_quoted(reply)}") from None
    return model


def _check_scale_out(answer: Answer, version: str) -> None:
    reply = _answered(answer)
    said = f"POST {ABORT} answered {_quoted(reply)}"
    if reply.status == _UNAUTHORIZED:
        raise WorkerFailure("unauthorized", said, hard=True)
    if reply.status == _FORBIDDEN:
        raise WorkerFailure("unfit", f"vLLM {version} must be started with {_SCALE_OUT}: {said}")
    if reply.status == _NOT_FOUND:
        raise WorkerFailure("unfit", f"vLLM 0.32 or later is needed, with {_SCALE_OUT}; this is {version}: {said}")
    if reply.status != OK:
        raise WorkerFailure(f"http_{reply.status}", said)


def _weights(answer: Answer) -> dict[str, Any] | None:
    """Read `/weight_info`; None where it is not there, as nothing of the development mode is without its switch."""
    reply = _answered(answer)
    return None if reply.status == _NOT_FOUND else control_body(reply)


def _paths(reply: Reply) -> frozenset[str] | None:
    """The routes there are; None where documentation is off (`--disable-fastapi-docs`)."""
    paths = _object(reply).get("paths")
    return frozenset(paths) if isinstance(paths, dict) else None


def _config(reply: Reply) -> dict[str, Any]:
    """The server's own configuration; empty where it does not tell."""
    config = _object(reply).get("vllm_config")
    return config if isinstance(config, dict) else {}


def _object(reply: Reply) -> dict[str, Any]:
    if reply.status != OK:
        return {}
    try:
        body = orjson.loads(reply.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _logprobs(config: dict[str, Any]) -> tuple[LogprobMeaning, tuple[str, ...]]:
    """What a logprob is there; raises WorkerFailure `unfit` where it is none."""
    mode = _at(config, "model_config", "logprobs_mode")
    if mode == "raw_logprobs":
        return "raw", ()
    if mode == "processed_logprobs":
        return "processed", ()
    if isinstance(mode, str) and mode.endswith("logits"):
        raise WorkerFailure(
            "unfit", f"--logprobs-mode {mode} gives no log-probabilities: raw_ or processed_logprobs does"
        )
    return "unknown", ("/server_info does not tell --logprobs-mode: what its logprobs mean is unknown",)


def _at(config: Any, *path: str) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _quoted(reply: Reply) -> str:
    return f"HTTP {reply.status}: {excerpt(reply)}"
