"""A sglang-router in front of engines: what it lets through, whom it sends to, how it says that one is gone.

Invariants:

- Pure, and about generation alone: every control route of the engines is 404 at the router (seen on 0.3.2).
- What the router would drop without a word is refused by name, never sent: routed experts cannot be had through one.
- A router that sends to more engines than we were told of is found out, for those would neither be stopped nor updated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Call, Completion, GenerateRequest, Reply
from rollout_svc.engines.parsing import OK, excerpt
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.errors import SampleFailure, WorkerFailure

__all__ = ["LISTING", "OWN", "PASSED", "PASSED_SAMPLING", "RoutedSGLang", "listed_engines", "too_many"]

LISTING: Final = Call("GET", "/workers")
"""Asks a router for its engines; cheap, and never sent on to one of them."""
OWN: Final = Call("GET", "/server_info")
"""Answered by an engine itself alone: 404 at a router."""

PASSED: Final = frozenset(
    {
        *("audio_data", "background", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room"),
        *(
            "conversation_id",
            "custom_labels",
            "custom_logit_processor",
            "data_parallel_rank",
            "extra_key",
            "image_data",
        ),
        *("input_embeds", "input_ids", "log_metrics", "logprob_start_len", "lora_id", "lora_path", "modalities"),
        *("model", "no_logs", "priority", "return_bytes", "return_entropy", "return_hidden_states", "return_logprob"),
        *("return_text_in_logprobs", "rid", "sampling_params", "session_params", "stream", "text"),
        *("token_ids_logprob", "top_logprobs_num", "video_data"),
    }
)
"""Top-level fields of `/generate` that arrive at the engine; the request is written anew and all others are dropped."""
PASSED_SAMPLING: Final = frozenset(
    {
        *("ebnf", "frequency_penalty", "ignore_eos", "json_schema", "max_new_tokens", "min_new_tokens", "min_p", "n"),
        *("no_stop_trim", "presence_penalty", "regex", "repetition_penalty", "sampling_seed"),
        *("skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
    }
)
"""Keys of `sampling_params` that arrive."""

_GONE: Final = b"call_upstream_request_error"  # its code for an engine it could not reach, or that broke off
_SERVER_ERROR: Final = 500


class RoutedSGLang(SGLangDialect):
    """SGLang's dialect, where generation passes a router: the same words, fewer of them."""

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Call:
        """Build `POST /generate`; raises SampleFailure where something that was asked for would not arrive."""
        dropped = sorted(request.extra.keys() - PASSED)
        said = f"engine_extra: the router drops {', '.join(dropped)}" if dropped else self.refuses(request.sampling)
        if said is None and request.experts_from is not None:
            said = "routed experts: the router drops what asks for them"
        if said is not None:
            raise SampleFailure("dropped_by_router", said)
        return super().generate(request, stream=stream)

    def parse_generate(self, reply: Reply) -> Completion:
        """Read the answer; an engine that is gone is told by the router, with a connection of ours that is fine."""
        if reply.status == _SERVER_ERROR and _GONE in reply.body:
            raise WorkerFailure("connection", f"behind the router: {excerpt(reply)}", hard=True, accepted=True)
        return super().parse_generate(reply)

    def refuses(self, sampling: SamplingConfig) -> str | None:
        """Whatever would not arrive."""
        dropped = sorted(sampling.extra.keys() - PASSED_SAMPLING)
        return f"extra: the router drops {', '.join(dropped)}" if dropped else super().refuses(sampling)


def listed_engines(reply: Reply) -> tuple[str, ...] | None:
    """Whom a router sends to; None where it does not say (another kind of balancer, a key of its own).

    One address with several data-parallel ranks (`URL@RANK`) is one engine.
    """
    if reply.status != OK:
        return None
    try:
        urls = [worker["url"] for worker in orjson.loads(reply.body)["workers"]]
        return tuple(dict.fromkeys(url.partition("@")[0].rstrip("/") for url in urls))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def too_many(listed: Collection[str] | None, engines: Sequence[str]) -> str | None:
    """Say that a router sends to engines beside those we were told of; None where it does not.

    Addresses may differ, for the router may see another network than we do: only their number has to fit.
    """
    if listed is None or len(listed) <= len(engines):
        return None
    unknown = sorted(set(listed) - set(engines))
    return f"it sends to {len(listed)} engines, and {len(engines)} are listed: not {', '.join(unknown)}"
