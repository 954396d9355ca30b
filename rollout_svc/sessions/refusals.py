"""Why a turn was not made, as HTTP tells it; `openai.py` and `anthropic.py` put it into their shapes.

| raised | status | the client |
|---|---|---|
| `NotNow`, `WorkerFailure` | 503 + `Retry-After` | asks again by itself |
| `ServiceError` | its own | is wrong |
| `SampleFailure` of a prompt that is too long | 400 | shortens what it says: each API has its own words for it |
| `SampleFailure` | 400 where the messages are at fault, 422 else | is not to ask the same again |
| `StaleAttempt`, `Interrupted` | 410 | is over: its sample was taken back |
| anything else | 500 | met a bug |

Invariant: pure. A client's own retries are told apart: what cannot succeed later says `x-should-retry: false`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rollout_svc.chat_template import BAD_PROMPT
from rollout_svc.errors import (
    BadRequest,
    Interrupted,
    NotNow,
    SampleFailure,
    ServiceError,
    StaleAttempt,
    WorkerFailure,
)
from rollout_svc.overflow import is_overflow

__all__ = ["OVERFLOW", "Refusal", "headers", "refusal"]

OVERFLOW: Final = "context_length_exceeded"
"""Code of a turn whose messages do not fit the model's context: OpenAI's own, by which agents know to shorten them."""

_OVER: Final = "session_over"
_CLIENTS_FAULT: Final = frozenset({BAD_PROMPT, "rejected_by_engine"})
_RETRY_S: Final = 1.0


class Refusal(NamedTuple):
    """One refusal, in no API's own words.

    Attributes:
        status: of HTTP.
        code: a short word of ours.
        message: for people.
        param: path of the field that is wrong; None: none is.
        retry_after_s: when to ask again; None: never.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def refusal(error: BaseException) -> Refusal:
    """Tell how an error is answered."""
    if isinstance(error, NotNow):
        return Refusal(error.status, error.type, error.message, None, error.retry_after_s)
    if isinstance(error, ServiceError):
        return Refusal(error.status, error.type, error.message, _param(error))
    if isinstance(error, WorkerFailure):
        return Refusal(503, error.kind, f"no engine could take the turn: {error.message}", None, _RETRY_S)
    if isinstance(error, SampleFailure):
        if is_overflow(error):
            return Refusal(400, OVERFLOW, error.message, "messages")
        status = 410 if error.reason == _OVER else 400 if error.reason in _CLIENTS_FAULT else 422
        return Refusal(status, error.reason, error.message)
    if isinstance(error, StaleAttempt | Interrupted):
        return Refusal(410, _OVER, "this session is over: its sample was taken back")
    return Refusal(500, "internal", "a bug: its traceback is in the service's log")


def _param(error: ServiceError) -> str | None:
    if isinstance(error, BadRequest) and isinstance(error.detail, list) and error.detail:
        path = error.detail[0].get("path")
        return path if isinstance(path, str) else None
    return None


def headers(error: BaseException) -> dict[str, str]:
    """The headers that go with an error: what the clients of both APIs heed before they ask again by themselves."""
    after = refusal(error).retry_after_s
    return {"x-should-retry": "false"} if after is None else {"Retry-After": f"{after:g}"}
