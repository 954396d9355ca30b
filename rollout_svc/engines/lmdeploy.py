"""The LMDeploy dialect, spoken by `lmdeploy serve api_server` 0.16 and its like.

Invariants:

- Pure: bytes in, records out; no clock, no socket.
- A completion that is returned has as many logprobs as ids, each finite, each belonging to its id, the stop token's
  included.
- The default of a key that matters is never relied on: `max_tokens` (128 there), `top_k` (50 there),
  `include_stop_str_in_output` (false there: the stop token would be missing), and what the model's own
  `generation_config.json` may say of `min_p` and `repetition_penalty` are always sent.
- It has no weight version, loads none from a path, freezes nothing and flushes no cache: none of that is claimed.

Its own count of requests is not asked for: the gauges of `/metrics` (`lmdeploy:num_requests_running`, `…_waiting`,
`lmdeploy:num_api_requests_waiting`) are written every 10 s, and an idle engine of 10 s ago proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Call, Completion, EngineInfo, EngineProfile, GenerateRequest, Health, Reply
from rollout_svc.engines.lmdeploy_probe import NAME, PROBE, has_no_logprobs, read_profile, without_logprobs
from rollout_svc.engines.lmdeploy_stream import LMDeployReader
from rollout_svc.engines.memory import TAGS, Asleep, Tag
from rollout_svc.engines.params import UNSENT, SamplingParams, extra_of, lift_of
from rollout_svc.engines.parsing import OK, check_numbers, check_status, control_body, excerpt, failure_of, raw_experts
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import FinishReason
from rollout_svc.tensors.experts import RawExperts

__all__ = ["LMDeployDialect"]

_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
_FIRST_SESSION: Final = 10**9  # smaller ids are compared with the engine's internal ones, and refused at random
_SESSIONS: Final = 2**52  # with the first still exact in a JSON number
_NEUTRAL: Final[dict[str, Any]] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_HOTTEST: Final = 2.0  # temperature
_LACKING: Final = frozenset(
    {
        *("seed", "sampling_seed", "random_seed", "n", "min_tokens", "min_new_tokens", "logit_bias", "priority"),
        *("presence_penalty", "frequency_penalty", "logprobs", "json_schema", "regex", "response_format"),
    }
)
"""Settings other engines have; LMDeploy's `/generate` would ignore them without a word."""
_REFUSED: Final = 400
_UNKNOWN_ROUTE: Final = 404
# 409: its session is taken; 499: somebody else cancelled it. Neither is the sample's doing.
_OUT_OF_OUR_HANDS: Final = frozenset({409, 499})
_GONE: Final = re.compile(rb"Session -?\d+ not found")
_STARTED: Final = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)\s*$", re.MULTILINE)
_KEY: Final = re.compile(r"[0-9a-f]{20,200}")  # an object id of Ray in hex: 56 digits now
_READY: Final = "healthy"
_DEAD: Final = "unhealthy"


class LMDeployDialect:
    """Builds and parses LMDeploy's HTTP calls."""

    name = NAME

    def __init__(self) -> None:
        self._params = SamplingParams(_NEUTRAL)

    # -- generation ------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Call:
        """Build `POST /generate`: token ids in, token ids and logprobs out; it takes no seed."""
        body = {
            **extra_of(request),
            **self._params.of(request.sampling),
            "session_id": _session(request.request_id),
            "input_ids": request.input_ids,
            "max_tokens": request.max_tokens,
            "return_logprob": True,
            "include_stop_str_in_output": True,
            "stream": stream,
        }
        if request.experts_from is not None:
            body["return_routed_experts"] = True
        return Call("POST", "/generate", orjson.dumps(body), lift=lift_of(request, "numbers"))

    def parse_generate(self, reply: Reply) -> Completion:
        """Read the answer of `/generate`.

        Raises:
            WorkerFailure: 401, 403, 404, 409, 429, 499 or 5xx, or the engine cannot make logprobs.
            SampleFailure: any other status, or a body that is not a valid completion.
        """
        if reply.status != OK:
            raise _failure(reply)
        try:
            body = orjson.loads(reply.body)
            meta = body["meta_info"]
            return _finished(body["output_ids"], meta["output_token_logprobs"], meta["finish_reason"])
        except (ValueError, KeyError, TypeError) as error:
            raise SampleFailure("invalid_response", f"{type(error).__name__}: {error}: {excerpt(reply)}") from error

    def reader(self) -> LMDeployReader:
        """Read a stream of deltas."""
        return LMDeployReader(_finished, lambda code, words: _failure(Reply(code, words.encode())))

    def experts_of(self, lifted: Any, request: GenerateRequest) -> RawExperts | None:  # noqa: ARG002 - always all rows
        """Numbers of all hidden layers, from the first token on; or, on Ray, the key of what has to be fetched."""
        if isinstance(lifted, str):
            if not _KEY.fullmatch(lifted):  # LMDeploy 0.12 sends a pickle here, which is never read
                raise SampleFailure("experts_invalid", f"routed experts: {lifted!r:.60} is no key of a Ray object")
            return RawExperts("key", lifted)
        return raw_experts("array", lifted)

    def refuses(self, sampling: SamplingConfig) -> str | None:
        """No seed, temperatures up to 2, top-p above 0; what it would ignore in silence is named."""
        if sampling.seed is not None:
            return "seed: LMDeploy takes none"
        if sampling.temperature > _HOTTEST:
            return f"temperature: LMDeploy takes 0 to {_HOTTEST:g}, not {sampling.temperature:g}"
        if not 0 < sampling.top_p <= 1:
            return f"top_p: LMDeploy takes above 0 and up to 1, not {sampling.top_p:g}"
        if sampling.top_k is not None and sampling.top_k < 0:
            return f"top_k: LMDeploy takes 0 (all) and up, not {sampling.top_k}"
        given = {key for key, value in sampling.extra.items() if value not in UNSENT}
        lacking = min(_LACKING & given, default=None)
        return None if lacking is None else f"extra.{lacking}: LMDeploy's /generate has no such setting"

    # -- what it is ------------------------------------------------------------------------------------------

    def probe(self) -> tuple[Call, ...]:
        """Ask who it is, then for things it must refuse; see `lmdeploy_probe`."""
        return PROBE

    def parse_probe(self, replies: Sequence[Reply | WorkerFailure]) -> EngineProfile:
        """Recognise LMDeploy by the owner of its models, and its switches by what it refuses."""
        return read_profile(replies)

    def info(self) -> Call:
        """`/metrics` says when the process started: the weights of one that is another by now are not known."""
        return Call("GET", "/metrics")

    def parse_info(self, reply: Reply) -> EngineInfo:
        """There is no label; without metrics (`--disable-metrics`: 404) nothing is known of the process either."""
        if reply.status == _UNKNOWN_ROUTE:
            return EngineInfo(weight_label=None)
        check_status(reply)
        started = _STARTED.search(reply.body)
        return EngineInfo(weight_label=None, process=None if started is None else started[1].decode())

    def ping(self) -> Call:
        """`/health` tells what its monitor found, up to 12 s ago; it needs no key."""
        return Call("GET", "/health")

    def parse_ping(self, reply: Reply) -> Health:
        """Read the status: asleep or loading it is there; `unhealthy` is an engine that died under its server."""
        try:
            body = orjson.loads(reply.body)
            status, words = str(body["status"]), f"GET /health: {body['status']}: {body.get('message')}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return Health(alive=True, ready=False, reason=f"GET /health: HTTP {reply.status}: {excerpt(reply)}")
        return Health(alive=status != _DEAD, ready=status == _READY, reason=words)

    def loads(self) -> Call:
        """There is no count to be trusted; see the module."""
        return self.info()

    def parse_loads(self, reply: Reply) -> int:
        """Refuse to guess."""
        raise WorkerFailure("cannot", f"LMDeploy's own count is up to 10 s old (HTTP {reply.status})")

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """One call aborts everything; by id, one id a call.

        By id, a request that waits for one of the engine's handles is not stopped, and cannot be found again.
        """
        if request_ids is None:
            return [Call("POST", "/abort_request", b'{"abort_all":true}', admin=True)]
        bodies = ({"session_id": _session(request_id), "abort_all": False} for request_id in request_ids)
        return [Call("POST", "/abort_request", orjson.dumps(body), admin=True) for body in bodies]

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> list[Call]:  # noqa: ARG002
        """Refuse: it takes weights from a trainer only."""
        raise WorkerFailure("cannot", f"LMDeploy loads no weights from a path ({path})")

    def forget_load(self, version: int) -> list[Call]:  # noqa: ARG002
        """None: a load that begins has nothing of the one before."""
        return []

    def set_version(self, version: int) -> list[Call]:  # noqa: ARG002 - there is nothing to tell it to
        """It keeps no label."""
        return []

    def freeze(self, cache: Literal["keep", "drop"]) -> list[Call]:
        """Refuse: its only pause is `/sleep`, which aborts everything."""
        raise WorkerFailure("cannot", f"LMDeploy cannot freeze (cache: {cache})")

    def thaw(self) -> list[Call]:
        """Nothing is ever frozen."""
        return []

    def flush_cache(self) -> list[Call]:
        """It has no way to; sleep implies it."""
        return []

    def offloads(self, tags: frozenset[Tag]) -> frozenset[Tag]:  # noqa: ARG002 - whatever is asked for
        """All or nothing."""
        return frozenset(TAGS)

    def offload(self, tags: frozenset[Tag]) -> list[Call]:  # noqa: ARG002 - whatever is asked for
        """`/sleep?level=1` keeps the weights in host memory; the empty body is there for its content type."""
        return [Call("POST", "/sleep?level=1", b"{}", admin=True)]

    def wake(self, tag: Tag) -> list[Call]:
        """`/wakeup?tags=`: it generates again when the last is back."""
        return [Call("POST", f"/wakeup?tags={tag}", b"{}", admin=True)]

    def asleep(self) -> Call:
        """`/is_sleeping`, which looks, where `/health` tells what was found up to 12 s ago."""
        return Call("GET", "/is_sleeping")

    def parse_asleep(self, reply: Reply) -> Asleep | None:
        """Read it: it tells neither what is given up, nor whether the weights were kept."""
        return Asleep(frozenset(TAGS if control_body(reply).get("is_sleeping") is True else ()), kept=False)

    def parse_done(self, reply: Reply) -> None:
        """200; or 400 to the abort of a session that is not there any more, which is what was wanted."""
        if reply.status == OK or (reply.status == _REFUSED and _GONE.search(reply.body)):
            return
        raise WorkerFailure(f"http_{reply.status}", excerpt(reply))


def _session(request_id: str) -> int:
    """The engine's id of a wire id, which is 32 hex characters."""
    return _FIRST_SESSION + int(request_id, 16) % _SESSIONS


def _failure(reply: Reply) -> WorkerFailure | SampleFailure:
    """Make the failure that a generation answered by anything but 200 is."""
    if reply.status in _OUT_OF_OUR_HANDS:
        return WorkerFailure(f"http_{reply.status}", f"HTTP {reply.status}: {excerpt(reply)}")
    if has_no_logprobs(reply):
        return without_logprobs()
    return failure_of(reply)


def _finished(ids: Any, pairs: Any, finish: Any) -> Completion:
    """Make a completion of what an answer says; no token has no pairs, or null. Raises SampleFailure."""
    try:
        kind = finish["type"]
        pairs = [] if pairs is None and not ids else pairs
        logprobs = [pair[0] for pair, token in zip(pairs, ids, strict=True) if pair[1] == token]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SampleFailure("invalid_response", f"{type(error).__name__}: {error}") from error
    if not isinstance(kind, str) or kind not in _FINISH:
        raise SampleFailure("invalid_response", f"unknown finish reason {kind!r:.100}")
    if len(logprobs) != len(ids):
        raise SampleFailure("invalid_response", "output_token_logprobs do not belong to output_ids")
    check_numbers(ids, logprobs)
    return Completion(ids=ids, logprobs=logprobs, finish_reason=_FINISH[kind], engine_finish_reason=kind, spans=())
