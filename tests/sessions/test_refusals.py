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
