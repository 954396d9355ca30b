"""What an LMDeploy server is, found out without generating anything.

Invariants:

- Pure, and changes nothing there: beside its models it is asked only for things that it must refuse, and how it does
  tells its switches. `/openapi.json` says nothing of them, and may be off (`--disable-fastapi-docs`).
- A switch is called missing only where the server itself says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call, EngineProfile, Reply
from rollout_svc.engines.parsing import OK, control_body, excerpt
from rollout_svc.errors import WorkerFailure

__all__ = ["NAME", "PROBE", "has_no_logprobs", "read_profile", "without_logprobs"]

NAME: Final = "lmdeploy"
PROBE: Final = (
    Call("GET", "/v1/models"),
    Call("POST", "/abort_request", b'{"session_id":-1,"abort_all":false}', admin=True),  # no session is ever called so
    Call("POST", "/generate", b'{"input_ids":[],"return_logprob":true,"return_routed_experts":true}'),
    Call("GET", "/distserve/engine_info"),  # of the PyTorch backend alone
    Call("POST", "/destroy_weights_update_group", b'{"group_name":"rollout-svc-nobody"}', admin=True),  # since 0.14
    Call("GET", "/is_sleeping"),
)
_CAPABILITIES: Final = ("abort", "abort_all", "stream")
_SLEEP: Final = ("offload", "weights_backup")
_REFUSED: Final = 400
_UNKNOWN_ROUTE: Final = 404
_NOT_IMPLEMENTED: Final = 501
_ASLEEP: Final = 503
_NO_LOGPROBS: Final = b"logprobs_mode"  # looked at first, then the experts, then the prompt
_NO_PROMPT: Final = b"must not be an empty list"
_ASLEEP_WORDS: Final = "it is asleep: whether it was started with --logprobs-mode shows when it wakes"
_MEANING_WORDS: Final = "its backend is not PyTorch, or does not say: what its logprobs are of is unknown"
_CACHE_WORDS: Final = (
    "it cannot be told to drop its prefix cache: leave --enable-prefix-caching off, "
    "or put it to /sleep and /wakeup around every update"
)


def read_profile(replies: Sequence[Reply | WorkerFailure]) -> EngineProfile:
    """Read the answers to `PROBE`; raises as `Dialect.parse_probe`."""
    model = _served(replies[0])
    abort, nothing, backend, group = _answer(replies[1]), _answer(replies[2]), replies[3], replies[4]
    sleep = replies[5:]
    if abort.status == _NOT_IMPLEMENTED:
        words = "started without --enable-abort-handling, which it needs: nothing could be stopped there"
        raise WorkerFailure("unfit", words, hard=True)
    if has_no_logprobs(nothing):
        raise without_logprobs()
    is_pytorch = isinstance(backend, Reply) and backend.status == OK
    sleeps = any(isinstance(reply, Reply) and reply.status == OK for reply in sleep)
    has_experts = nothing.status == _REFUSED and _NO_PROMPT in nothing.body
    warnings = [_CACHE_WORDS]
    warnings += [_ASLEEP_WORDS] if nothing.status == _ASLEEP else []
    warnings += [] if is_pytorch else [_MEANING_WORDS]
    # Without the route it is 404, on TurboMind 501.
    has_groups = isinstance(group, Reply) and group.status == _REFUSED and b'"success"' in group.body
    return EngineProfile(
        dialect=NAME,
        capabilities=(
            *_CAPABILITIES,
            *("experts",) * has_experts,
            *("cuda_ipc",) * is_pytorch,
            *("distributed",) * has_groups,
            *(_SLEEP * sleeps),
        ),
        logprobs="raw" if is_pytorch else "unknown",
        model=model,
        warnings=tuple(warnings),
        ranks=_ranks(backend) if is_pytorch else 1,
    )


def has_no_logprobs(reply: Reply) -> bool:
    """Whether a generation was refused because the server cannot make logprobs."""
    return reply.status == _REFUSED and _NO_LOGPROBS in reply.body


def without_logprobs() -> WorkerFailure:
    """The failure of a server that cannot: the samples sent there have done nothing."""
    return WorkerFailure("unfit", "started without --logprobs-mode raw_logprobs, which it needs", hard=True)


def _ranks(backend: Reply | WorkerFailure) -> int:
    """How many tensor-parallel ranks it has: of its engine info, JSON in a JSON string; one where it does not say."""
    try:
        said: Any = orjson.loads(backend.body if isinstance(backend, Reply) else b"")
        size = (orjson.loads(said) if isinstance(said, str) else said)["tp_size"]
    except (ValueError, KeyError, TypeError):
        return 1
    return size if type(size) is int and size > 0 else 1


def _answer(reply: Reply | WorkerFailure) -> Reply:
    """Take the answer of a route that LMDeploy's proxy has not; raises WorkerFailure where there is none."""
    if isinstance(reply, WorkerFailure):
        raise reply
    if reply.status == _UNKNOWN_ROUTE:
        words = "LMDeploy without /generate or /abort_request: its proxy, or too old a version"
        raise WorkerFailure("wrong_dialect", words, hard=True)
    return reply


def _served(models: Reply | WorkerFailure) -> str:
    """Read the name of what it serves; raises WorkerFailure, `wrong_dialect` where somebody else answers."""
    if isinstance(models, WorkerFailure):
        raise models
    try:
        card = control_body(models)["data"][0]
        name, owner = card["id"], card["owned_by"]
    except (KeyError, TypeError, IndexError) as error:
        raise WorkerFailure("wrong_dialect", f"GET /v1/models: {excerpt(models)}") from error
    except WorkerFailure as failure:
        if failure.kind in ("not_found", "bad_body"):
            raise WorkerFailure("wrong_dialect", f"GET /v1/models: {failure.message}") from failure
        raise
    if owner != NAME:
        raise WorkerFailure("wrong_dialect", f"GET /v1/models: owned_by {owner!r:.100}")
    return str(name)
