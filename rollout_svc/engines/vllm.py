"""The vLLM dialect, spoken by vLLM 0.32: tokens in, tokens out, by `/inference/v1/generate`.

Invariants:

- Pure: bytes in, records out; no clock, no socket. All it remembers of a probe is whether weights have labels there,
  and whether answers have routed experts: those who did not ask get them too, and they are kept off the loop.
- The engine's own id is `generate-tokens-<wire id>`: given to aborts, taken off answers. `X-Request-Id` is never sent,
  for it would win over the id in the body.
- An empty list of ids makes no call: vLLM reads one as "everything".
- The default of a key that matters is never relied on: `max_tokens` (the rest of the context there), `logprobs` (none
  there), `clear_cache` (true there) and `mode` (abort there) are always sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import (
    LOADING,
    Call,
    Completion,
    EngineInfo,
    EngineProfile,
    GenerateRequest,
    Health,
    Reply,
)
from rollout_svc.engines.memory import TAGS, Asleep, Tag
from rollout_svc.engines.params import SamplingParams, extra_of, lift_of
from rollout_svc.engines.parsing import OK, control_body, excerpt, raw_experts
from rollout_svc.engines.vllm_answers import ID_PREFIX, VLLMStream, completion_of
from rollout_svc.engines.vllm_probe import ABORT, PROBE, gauges_of, profile_of
from rollout_svc.errors import WorkerFailure
from rollout_svc.tensors.experts import RawExperts

__all__ = ["VLLMDialect"]

_NOT_FOUND: Final = 404
_EMPTY_ROUND: Final = ("/start_weight_update", "/finish_weight_update")
_UNAVAILABLE: Final = 503
# vLLM ignores keys it does not know: those of other engines would be lost without a word.
_FOREIGN: Final = {
    "max_new_tokens": "sampling.max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "sampling.seed",
    "stop_regex": "structured_outputs",
    "json_schema": "structured_outputs",
    "regex": "structured_outputs",
    "ebnf": "structured_outputs",
    "custom_params": "extra_args",
    "random_seed": "sampling.seed",
}
# Keys this dialect sets itself.
_OURS: Final = {"max_tokens": "sampling.max_tokens", "logprobs": "one logprob a token", "n": "prompt_repeat_k"}


class VLLMDialect:
    """Builds and parses vLLM's HTTP calls."""

    name = "vllm"

    def __init__(self) -> None:
        self._params = SamplingParams()
        self._labels = True
        self._sends_experts = False
        self._releases_cache = False

    # -- generation ------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Call:
        """Build `POST /inference/v1/generate`: token ids in, token ids and logprobs out."""
        params = {**self._params.of(request.sampling), "max_tokens": request.max_tokens, "logprobs": 0}
        if request.seed is not None:
            params["seed"] = request.seed
        if request.experts_from is not None:  # whether there are any the server was told when it started
            params["routed_experts_prompt_start"] = request.experts_from
        body = {
            **extra_of(request),
            "request_id": request.request_id,
            "token_ids": request.input_ids,
            "sampling_params": params,
            "output_mode": "tokens",
            "stream": stream,
        }
        return Call(
            "POST",
            "/inference/v1/generate",
            orjson.dumps(body),
            lift=lift_of(request, "base64", unasked=self._sends_experts),
        )

    def parse_generate(self, reply: Reply) -> Completion:
        """Read the answer; raises WorkerFailure or SampleFailure."""
        return completion_of(reply, labels=self._labels)

    def reader(self) -> VLLMStream:
        """Make a reader for one stream of deltas."""
        return VLLMStream(labels=self._labels)

    def experts_of(self, lifted: Any, request: GenerateRequest) -> RawExperts | None:
        """A `.npy` file of the layers that have experts, from the token on that was asked for."""
        start = request.experts_from
        return None if start is None else raw_experts("npy", lifted, start)

    def refuses(self, sampling: SamplingConfig) -> str | None:
        """Name the first setting that vLLM would ignore, or that an answer has no room for."""
        for key, value in sampling.extra.items():
            if value in (None, [], {}, ""):
                continue
            if key in _FOREIGN:
                return f"extra.{key}: vLLM knows no such key, and would ignore it; it has {_FOREIGN[key]}"
            if key in _OURS and not (key == "n" and value == 1):
                return f"extra.{key}: set by the service ({_OURS[key]})"
        return None

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """Abort by id where generation is: one call for all ids. Everything: by the development mode's own route.

        That one reaches the API process which answers it: with several (`--api-server-count`) it is to be repeated.
        """
        if request_ids is None:
            return [Call("POST", "/abort_requests", b"{}", admin=True)]
        if not request_ids:
            return []
        return [Call("POST", ABORT, orjson.dumps({"request_ids": [ID_PREFIX + wire_id for wire_id in request_ids]}))]

    def ping(self) -> Call:
        """`/health` looks at a flag; it stays 200 while paused."""
        return Call("GET", "/health")

    def parse_ping(self, reply: Reply) -> Health:
        """200, or 503 once the engine core has died, shortly before the server does."""
        if reply.status == OK:
            return Health(alive=True, ready=True, reason="")
        dead = reply.status == _UNAVAILABLE and not reply.body
        reason = "the engine core is dead" if dead else excerpt(reply)
        return Health(alive=not dead, ready=False, reason=f"/health answered {reply.status}: {reason}")

    def probe(self) -> tuple[Call, ...]:
        """Build the calls that tell what this server is."""
        return PROBE

    def parse_probe(self, replies: Sequence[Reply | WorkerFailure]) -> EngineProfile:
        """Read their answers; raises WorkerFailure (`wrong_dialect`, `unfit`, or why there is no answer)."""
        profile = profile_of(replies)
        self._labels = "weight_version" in profile.capabilities
        self._sends_experts = "experts" in profile.capabilities
        self._releases_cache = "offload_kv" in profile.capabilities
        return profile

    def info(self) -> Call:
        """`/weight_info` carries the weight label."""
        return Call("GET", "/weight_info", admin=True)

    def parse_info(self, reply: Reply) -> EngineInfo:
        """Read the weight label; there is none without the development mode."""
        return EngineInfo.labelled(None if reply.status == _NOT_FOUND else control_body(reply).get("weight_version"))

    def loads(self) -> Call:
        """`/metrics`: what runs and waits, as of the engine's last step."""
        return Call("GET", "/metrics")

    def parse_loads(self, reply: Reply) -> int:
        """Sum the gauges over the engines behind this server."""
        if reply.status != OK:
            raise WorkerFailure(f"http_{reply.status}", excerpt(reply))
        count = gauges_of(reply.body)
        if count is None:
            raise WorkerFailure("bad_loads", "no vllm:num_requests_running and vllm:num_requests_waiting")
        return count

    def freeze(self, cache: Literal["keep", "drop"]) -> list[Call]:
        """`/pause?mode=keep`: `clear_cache=true` preempts what runs, whatever its documentation says."""
        clear = "false" if cache == "keep" else "true"
        return [Call("POST", f"/pause?mode=keep&clear_cache={clear}", admin=True)]

    def thaw(self) -> list[Call]:
        """`/resume`."""
        return [Call("POST", "/resume", admin=True)]

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> list[Call]:
        """Reload the weights in every worker process, drop cached prefixes, label: in this order.

        A load that fails leaves no weights at all, and an engine that is well by every other account: only its label
        can say so, and does until the last step.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        load = Call("POST", "/collective_rpc", orjson.dumps(body), admin=True)
        return [
            _label(f"{LOADING}{version}"),
            load,
            *(self.flush_cache() if flush else ()),
            *self.set_version(version),
        ]

    def forget_load(self, version: int) -> list[Call]:
        """Label it as loading, then open and end a round that moves nothing.

        vLLM keeps what it was given of a layer until it has all of it, over a load that failed too, and takes it for
        part of the next one, which then fails as well, time and again. At the end of a round it forgets it. The round
        may be open already, and there is none without `--weight-transfer-config`: only a restart helps then.
        """
        if not self._labels:
            return []
        return [_label(f"{LOADING}{version}"), *(Call("POST", path, admin=True) for path in _EMPTY_ROUND)]

    def set_version(self, version: int) -> list[Call]:
        """`/update_weight_version`: a label, no more; none where nobody can set it."""
        return [_label(str(version))] if self._labels else []

    def flush_cache(self) -> list[Call]:
        """`/reset_prefix_cache`: answers `success: false` while requests hold blocks."""
        return [Call("POST", "/reset_prefix_cache?reset_running_requests=false", admin=True)]

    def offloads(self, tags: frozenset[Tag]) -> frozenset[Tag]:
        """Without weights the cache goes too; the cache goes alone where there is a route for it."""
        return tags if self._releases_cache and "weights" not in tags else frozenset(TAGS)

    def offload(self, tags: frozenset[Tag]) -> list[Call]:
        """`/sleep?level=1` keeps the weights in host memory; the cache alone is released by a paused engine only."""
        if self._releases_cache and "weights" not in tags:
            paused = Call("POST", "/pause?mode=abort&clear_cache=true", admin=True)
            return [paused, Call("POST", "/release_kv_cache_memory", admin=True)]
        return [Call("POST", "/sleep?level=1&mode=abort", admin=True)]

    def wake(self, tag: Tag) -> list[Call]:
        """`/wake_up?tags=`; and when the last is back `/resume`, which a released cache alone needs."""
        woken = Call("POST", f"/wake_up?tags={tag}", admin=True)
        return [woken, *self.thaw()] if tag == TAGS[-1] else [woken]

    def asleep(self) -> Call:
        """`/is_sleeping`: true of any pause as well."""
        return Call("GET", "/is_sleeping", admin=True)

    def parse_asleep(self, reply: Reply) -> Asleep | None:
        """Read it: it tells neither what is given up, nor whether the weights were kept."""
        return Asleep(frozenset(TAGS if control_body(reply).get("is_sleeping") is True else ()), kept=False)

    def parse_done(self, reply: Reply) -> None:
        """200, and `success` not false; raises WorkerFailure."""
        if reply.status != OK:
            raise WorkerFailure(f"http_{reply.status}", excerpt(reply))
        if reply.body[:1] == b"{" and control_body(reply).get("success") is False:
            raise WorkerFailure("refused", excerpt(reply))


def _label(label: str) -> Call:
    return Call("POST", "/update_weight_version", orjson.dumps({"new_version": label}), admin=True)
