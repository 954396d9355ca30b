"""Errors in the shapes of both APIs, and what tells their clients whether to ask again."""

from __future__ import annotations

import pytest

from rollout_svc.errors import (
    BadRequest,
    Conflict,
    Interrupted,
    NotFound,
    NotNow,
    SampleFailure,
    StaleAttempt,
    Unauthorized,
    WorkerFailure,
)
from rollout_svc.sessions import anthropic, openai
from rollout_svc.sessions.refusals import headers

OVERFLOWS = (
    "The input (30 tokens) is longer than the model's context length (20 tokens).",
    "The input (20 tokens) fills the model's context length (20 tokens).",
    "This model's maximum context length is 20 tokens, but the prompt has 30.",
    "The decoder prompt (length 30) is longer than the maximum model length of 20. Make sure that `max_model_len` is",
    "You passed 30 input tokens and requested 9 output tokens. However, the model's context length is only 20 tokens",
    "The request exceeds the model context length.",
)
OTHERS = (
    "temperature: no",
    "Unknown context: `x`",
    "The max_tokens 0 must be a positive integer.",
    "Token id 999 is out of vocabulary",
    "stop: a word is longer than 20 characters",
)
NEVER = {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "sent"),
    [
        (BadRequest.at("n", "no"), 400, "bad_request", "invalid_request_error", NEVER),
        (Unauthorized("no"), 401, "invalid_api_key", "authentication_error", NEVER),
        (NotFound("no"), 404, "not_found", "not_found_error", NEVER),
        (Conflict("no"), 409, "conflict", "conflict_error", NEVER),
        (SampleFailure("bad_prompt", "no"), 400, "bad_prompt", "invalid_request_error", NEVER),
        (SampleFailure("rejected_by_engine", "no"), 400, "rejected_by_engine", "invalid_request_error", NEVER),
        (SampleFailure("invalid_response", "no"), 422, "invalid_response", "invalid_request_error", NEVER),
        (SampleFailure("session_over", "no"), 410, "session_over", "not_found_error", NEVER),
        (StaleAttempt("no"), 410, "session_over", "not_found_error", NEVER),
        (Interrupted("no"), 410, "session_over", "not_found_error", NEVER),
        (NotNow("paused", "no", retry_after_s=2.5), 503, "paused", "overloaded_error", {"Retry-After": "2.5"}),
        (WorkerFailure("http_500", "no"), 503, "http_500", "overloaded_error", {"Retry-After": "1"}),
        (KeyError("no"), 500, "internal", "api_error", NEVER),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, code: str, kind: str, sent: dict[str, str]) -> None:
    """P4: nothing that is raised is told as something else; what cannot succeed later is not asked for again."""
    told, body = openai.write_error(error)
    assert (told, body["error"]["code"], headers(error)) == (status, code, sent)
    assert body["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert anthropic.write_error(error)[0] == status
    assert anthropic.write_error(error)[1]["error"]["type"] == kind


def test_a_refusal_names_the_field() -> None:
    """P35: in OpenAI's shape apart, in both in words."""
    error = BadRequest.at("n", "one answer a turn")
    told = {"message": "n: one answer a turn", "type": "invalid_request_error", "param": "n", "code": "bad_request"}
    assert openai.write_error(error) == (400, {"error": told})
    assert anthropic.write_error(error)[1]["error"]["message"] == "n: one answer a turn"


@pytest.mark.parametrize("words", OVERFLOWS)
def test_a_prompt_that_is_too_long_is_told_as_each_api_tells_it(words: str) -> None:
    """P4: by this, agents know that they are to shorten their messages; what the engine said comes with it."""
    for where in ("HTTP 400: ", "in the stream: "):
        status, told = openai.write_error(error := SampleFailure("rejected_by_engine", where + words))
        assert (status, told["error"]["code"], told["error"]["param"]) == (400, "context_length_exceeded", "messages")
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"] == f"This model's maximum context length is exceeded: {where}{words}"
        status, told = anthropic.write_error(error)
        assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert told["error"]["message"] == f"prompt is too long: {where}{words}"
        assert headers(error) == NEVER


@pytest.mark.parametrize("words", OTHERS)
def test_another_refusal_is_no_overflow(words: str) -> None:
    """P4: shortening would not help; nor does it where another reason says the same words."""
    for error in (SampleFailure("rejected_by_engine", words), SampleFailure("agent_error", OVERFLOWS[0])):
        assert openai.write_error(error)[1]["error"]["code"] == error.reason
        assert anthropic.write_error(error)[1]["error"]["message"] == error.message
