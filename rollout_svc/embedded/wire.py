"""Bodies of the HTTP dialect: requests checked and turned into records, outcomes turned into answers.

Invariants:
- Pure: no I/O, no clock but the times given.
- A body that breaks a rule raises `RefusedError` with the status and the body of the answer; nothing else is raised.
- Top-level keys that are not known are ignored; keys of `sampling_params` that are not known are refused.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.embedded.job import Job, Outcome
from rollout_svc.embedded.routing import encode
from rollout_svc.embedded.sampling import Sampling

if TYPE_CHECKING:
    from rollout_svc.embedded.tokens import Vocabulary

SAMPLING_KEYS: Final = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "sampling_seed",
)

NEUTRAL_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "n": (1,),
    "spaces_between_special_tokens": (True, False),
}
"""Keys that a client may send as a matter of course, taken with the values that change nothing."""


class RefusedError(Exception):
    """Raised when a request is answered with an error.

    Attributes:
        status: HTTP status.
        body: JSON body.
    """

    def __init__(self, body: dict[str, Any], status: int = 400) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


def invalid(message: str) -> RefusedError:
    """Refuse a value: the shape that the dialect gives to what its engine checks."""
    return RefusedError({"error": {"message": message}})


def malformed(message: str) -> RefusedError:
    """Refuse a body: the shape that the dialect gives to what its schema checks."""
    return RefusedError({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def wrong_type(key: str, expected: str, value: object) -> RefusedError:
    """Refuse a value of the wrong type at a path of the body."""
    return malformed(f"1 validation error: body.{key}: must be {expected}, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked generate request.

    Attributes:
        job: What the engine runs.
        return_logprob: Whether the answer lists log-probabilities.
        stream: Whether to answer with events as tokens are made.
        experts_from: The token that routed experts are told from; None: they are not.
    """

    job: Job
    return_logprob: bool
    stream: bool
    experts_from: int | None = None


def parse_generate(
    body: dict[str, Any], vocabulary: Vocabulary, *, vocab_size: int, context: int, experts: bool = False
) -> Generate:
    """Check a `/generate` body.

    Args:
        body: The decoded JSON.
        vocabulary: Encodes `text`.
        vocab_size: Ids the model knows.
        context: Most tokens a sequence may hold.
        experts: Whether routed experts are told at all; where not, asking for them is no error.

    Raises:
        RefusedError: 400.
    """
    rid = body.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise wrong_type("rid", "a string or null", rid)
    prompt = _prompt(body, vocabulary)
    if len(prompt) >= context:
        raise invalid(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            if len(prompt) > context
            else f"The input ({len(prompt)} tokens) fills the model's context length ({context} tokens)."
        )
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise invalid(f"input_ids: token id {outside} is outside the vocabulary of {vocab_size}.")
    sampling = parse_sampling(body.get("sampling_params"))
    wanted = _experts_from(body, len(prompt))
    experts_from = wanted if experts else None
    room = context - len(prompt)
    end_id = None if sampling.ignore_eos else vocabulary.end_id
    return Generate(
        Job(
            rid=rid or uuid.uuid4().hex,
            prompt=prompt,
            sampling=sampling,
            limit=room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens),
            stop_ids=sampling.stop_token_ids | ({end_id} if end_id is not None else frozenset()),
            wants_routing=experts_from is not None,
        ),
        return_logprob=_flag(body, "return_logprob", default=False),
        stream=_flag(body, "stream", default=False),
        experts_from=experts_from,
    )


def _experts_from(body: dict[str, Any], prompt_tokens: int) -> int | None:
    """Return the token that routed experts are asked for from on; None where they are not."""
    start = body.get("routed_experts_start_len")
    if start is not None and (type(start) is not int or not 0 <= start <= prompt_tokens):
        raise invalid(f"routed_experts_start_len must be an integer within [0, {prompt_tokens}], got {start!r}.")
    return (start or 0) if _flag(body, "return_routed_experts", default=False) else None


def _prompt(body: dict[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Return the prompt's ids from `input_ids` or `text`."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise invalid("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise invalid("Only one of text and input_ids should be provided.")
    if ids is None:
        if not isinstance(text, str):
            raise wrong_type("text", "a string or null", text)
        ids = vocabulary.encode(text)
    if not isinstance(ids, list):
        raise malformed(f"1 validation error: body.input_ids: must be list or null; got {type(ids).__name__}")
    wrong = next((token for token in ids if type(token) is not int), None)
    if isinstance(wrong, list):
        raise invalid("Batches are not supported by this engine: send one request for each prompt.")
    if wrong is not None or None in ids:
        raise wrong_type("input_ids", "a list of integers", wrong)
    if not ids:
        raise invalid("The prompt holds no tokens; at least one is needed.")
    return ids


def parse_sampling(params: object) -> Sampling:
    """Check `sampling_params`.

    Raises:
        RefusedError: 400; an unknown key is named, with those that are known.
    """
    if params is None:
        return Sampling()
    if not isinstance(params, dict):
        raise wrong_type("sampling_params", "an object or null", params)
    known = set(SAMPLING_KEYS) | NEUTRAL_ONLY.keys()
    for key in params:
        if key not in known:
            expected = ", ".join(f"`{name}`" for name in (*SAMPLING_KEYS, *NEUTRAL_ONLY))
            raise RefusedError({"error": f"unknown field `{key}`, expected one of {expected}"})
    given = {key: value for key, value in params.items() if value is not None}
    for key, neutral in NEUTRAL_ONLY.items():
        if key in given and given[key] not in neutral:
            allowed = " or ".join(repr(value) for value in neutral)
            raise invalid(f"{key} is not supported by this engine: only {allowed}, got {given[key]!r}.")
    top_k = _integer(given, "top_k", -1)
    if top_k is None or top_k == 0 or top_k < -1:
        raise invalid(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    return Sampling(
        max_new_tokens=_max_new_tokens(params),
        temperature=_temperature(given),
        top_p=_top_p(given),
        top_k=None if top_k == -1 else top_k,
        stop=_stop(given.get("stop")),
        stop_token_ids=_stop_token_ids(given.get("stop_token_ids")),
        ignore_eos=_flag(given, "ignore_eos", default=False),
        seed=_integer(given, "sampling_seed", None),
        skip_special_tokens=_flag(given, "skip_special_tokens", default=True),
        no_stop_trim=_flag(given, "no_stop_trim", default=False),
    )


def _max_new_tokens(params: dict[str, Any]) -> int | None:
    if "max_new_tokens" not in params:
        return Sampling().max_new_tokens
    value = _integer({"max_new_tokens": params["max_new_tokens"]}, "max_new_tokens", None)
    if value is not None and value < 0:
        raise invalid(f"max_new_tokens must be at least 0, got {value}.")
    return value


def _temperature(given: dict[str, Any]) -> float:
    value = _number(given, "temperature", 1.0)
    if not (math.isfinite(value) and value >= 0):
        raise invalid(f"temperature must be a non-negative finite number, got {given['temperature']}.")
    # Below this logits overflow when divided, and the draw is the likeliest token anyway.
    return value if value >= 1e-6 else 0.0  # noqa: PLR2004


def _top_p(given: dict[str, Any]) -> float:
    value = _number(given, "top_p", 1.0)
    if not 0 < value <= 1:
        raise invalid(f"top_p must be in (0, 1], got {given['top_p']}.")
    return value


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise wrong_type("sampling_params.stop", "a string or a list of strings", value)
    return tuple(item for item in found if item)


def _stop_token_ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise wrong_type("sampling_params.stop_token_ids", "a list of integers", value)
    return frozenset(value)


def _integer(given: dict[str, Any], key: str, default: int | None) -> int | None:
    value = given.get(key)
    if value is None:
        return default
    if type(value) is not int:
        raise wrong_type(f"sampling_params.{key}", "an integer", value)
    return value


def _number(given: dict[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(f"sampling_params.{key}", "a number", value)
    return float(value)


def _flag(body: dict[str, Any], key: str, *, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(key, "a boolean", value)
    return value


def read_flag(body: dict[str, Any], key: str, *, default: bool) -> bool:
    """Return a boolean of a body, `default` when it is absent or null.

    Raises:
        RefusedError: 400 for any other type.
    """
    return _flag(body, key, default=default)


def read_text(body: dict[str, Any], key: str) -> str | None:
    """Return a string of a body, None when it is absent or null.

    Raises:
        RefusedError: 400 for any other type.
    """
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong_type(key, "a string or null", value)
    return value


def need_text(body: dict[str, Any], key: str) -> str:
    """Return a string that a body must have.

    Raises:
        RefusedError: 400 when it is absent, null or of another type.
    """
    value = read_text(body, key)
    if value is None:
        raise malformed(f"1 validation error: body.{key}: field required")
    return value


def answer(request: Generate, outcome: Outcome, vocabulary: Vocabulary, elapsed_s: float) -> dict[str, Any]:
    """Build the body that answers a generate request, aborted ones included."""
    job = outcome.job
    meta: dict[str, Any] = {"id": job.rid, "finish_reason": outcome.finish_reason}
    if outcome.stage == "running":
        meta |= _running(job)
        meta["e2e_latency"] = elapsed_s
    meta |= _output(request, len(job.ids), outcome.version)
    if request.experts_from is not None and job.routing is not None:
        meta["routed_experts"] = encode(job.routing, request.experts_from)
    return {"text": _text(outcome, vocabulary), "output_ids": job.ids, "meta_info": meta}


def answer_so_far(request: Generate, count: int, version: str, vocabulary: Vocabulary) -> dict[str, Any]:
    """Build the body of an event before the last, while the job may be getting more tokens.

    Args:
        request: The request.
        count: Output tokens to tell of: those whose log-probability was there before the call.
        version: The label of the weights now.
        vocabulary: Decodes them.
    """
    job = request.job
    meta = {"id": job.rid, "finish_reason": None} | _running(job) | _output(request, count, version)
    ids = job.ids[:count]
    text = vocabulary.decode(ids, skip_special_tokens=job.sampling.skip_special_tokens)
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _running(job: Job) -> dict[str, Any]:
    """Say what is known of a request that has run."""
    return {
        "prompt_tokens": len(job.prompt),
        "num_retractions": job.retractions,
        "reasoning_tokens": 0,
        "cached_tokens": 0,
    }


def _output(request: Generate, count: int, version: str) -> dict[str, Any]:
    """Describe the first tokens of a request's output."""
    job = request.job
    meta: dict[str, Any] = {
        "weight_version": version,
        "weight_versions": job.spans(count),
        "completion_tokens": count,
    }
    if request.return_logprob:
        pairs = zip(job.logprobs[:count], job.ids[:count], strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        meta["output_token_logprobs_length"] = count
    return meta


def _text(outcome: Outcome, vocabulary: Vocabulary) -> str:
    """Return the output's text, cut before the stop string that ended it."""
    job = outcome.job
    text = vocabulary.decode(job.ids, skip_special_tokens=job.sampling.skip_special_tokens)
    matched = outcome.finish_reason.get("matched")
    if isinstance(matched, str) and not job.sampling.no_stop_trim:
        found = text.find(matched)
        return text if found < 0 else text[:found]
    return text
