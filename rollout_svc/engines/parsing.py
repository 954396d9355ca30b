"""What every dialect's parser needs: checks of numbers, failures by status, an excerpt for an error message.

Invariants:

- Pure, and knows no engine: what a status means here it means at any of them.
- A failure that speaks of the worker (keys, route, load) is never the sample's, and the other way round.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import numpy as np
import orjson

from rollout_svc.engines.calls import Reply
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import VersionSpan
from rollout_svc.tensors.experts import RawExperts

__all__ = [
    "check_numbers",
    "check_status",
    "control_body",
    "excerpt",
    "failure_of",
    "first_of",
    "raw_experts",
    "spans_of",
    "version_of",
]

OK: Final = 200
_SERVER_ERRORS: Final = 500
_CLIENT_ERRORS: Final = 400
# Statuses that speak of the worker (keys, route, load), not of the request.
_WORKER_STATUSES: Final = {401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "overloaded"}
_HARD_STATUSES: Final = frozenset({401, 403, 404})
_DIGITS: Final = b"0123456789,"
_NUMBER_TYPES: Final = frozenset({int, float})
_JSON_INTEGERS: Final = 2**63  # what a record is written with ends there
_LOGPROB_ROUNDING: Final = 1e-3  # a log of a probability may come out this much above 0, in half precision
_EXCERPT_BYTES: Final = 200  # of a foreign body, kept in an error message


def failure_of(reply: Reply) -> WorkerFailure | SampleFailure:
    """Make the failure that a generation answered by anything but 200 is."""
    status = reply.status
    if status in _WORKER_STATUSES or status >= _SERVER_ERRORS:
        kind = _WORKER_STATUSES.get(status, f"http_{status}")
        return WorkerFailure(
            kind, f"HTTP {status}: {excerpt(reply)}", retry_after_s=reply.retry_after_s, hard=status in _HARD_STATUSES
        )
    if status >= _CLIENT_ERRORS:
        return SampleFailure("rejected_by_engine", f"HTTP {status}: {excerpt(reply)}")
    return SampleFailure("invalid_response", f"HTTP {status}: {excerpt(reply)}")


def excerpt(reply: Reply) -> str:
    """The beginning of a body, for a person: one line, for a proxy's page of HTML is many."""
    return " ".join(reply.body[:_EXCERPT_BYTES].decode("utf-8", "replace").split())


def check_status(reply: Reply) -> None:
    """Raise WorkerFailure for a control call answered by anything but 200."""
    if reply.status != OK:
        kind = _WORKER_STATUSES.get(reply.status, f"http_{reply.status}")
        raise WorkerFailure(kind, f"HTTP {reply.status}: {excerpt(reply)}")


def control_body(reply: Reply) -> dict[str, Any]:
    """Read the JSON object a control call answered; raises WorkerFailure."""
    check_status(reply)
    try:
        body = orjson.loads(reply.body)
    except ValueError as error:
        raise WorkerFailure("bad_body", excerpt(reply)) from error
    if not isinstance(body, dict):
        raise WorkerFailure("bad_body", excerpt(reply))
    return body


def first_of(kind: type, *values: object) -> Any:
    """The first value of that very type (a boolean is no integer); None when there is none."""
    return next((value for value in values if type(value) is kind), None)


def check_numbers(ids: list[int], logprobs: list[float]) -> None:
    """Check types and ranges with loops that run in C and meet every element; JSON's booleans are no numbers.

    Raises:
        SampleFailure: `invalid_response`.
    """
    try:
        # Integers >= 0 are written with digits alone; writing them is cheaper than looking at each.
        valid = orjson.dumps(ids).translate(None, _DIGITS) == b"[]" and (not logprobs or _are_logprobs(logprobs))
    except (OverflowError, TypeError):
        valid = False
    if not valid:
        raise SampleFailure("invalid_response", "ids must be integers >= 0 and logprobs finite numbers <= 0")


def _are_logprobs(values: list[float]) -> bool:
    largest = max(values)
    if not math.isfinite(sum(values)) or largest > _LOGPROB_ROUNDING:
        return False
    # What is no number could not be summed, save a boolean; true is too large, and false is not below 0.
    return largest < 0 or _NUMBER_TYPES.issuperset(map(type, values))


def version_of(label: object) -> int | None:
    """The version a label means; None for one that is no integer, or none that JSON can carry on."""
    try:
        version = int(str(label))
    except ValueError:
        return None
    return version if abs(version) < _JSON_INTEGERS else None


def spans_of(reported: Any, length: int) -> tuple[VersionSpan, ...]:
    """Normalise `[{version, start, end}]` to spans that cover `[0, length)`; what does not is unknown (None)."""
    try:
        spans = tuple(VersionSpan(version_of(s["version"]), int(s["start"]), int(s["end"])) for s in reported)
    except (KeyError, TypeError, ValueError, OverflowError):
        return (VersionSpan(None, 0, length),)
    spans = tuple(span for span in spans if span.end > span.start)
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != length or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        return (VersionSpan(None, 0, length),)
    return spans


def raw_experts(form: Literal["npy", "int32", "array"], lifted: Any, start: int = 0) -> RawExperts | None:
    """Name what was lifted from an answer, by the form its engine sends and the token its first row is of.

    Raises:
        SampleFailure: `experts_invalid`: it is nothing of that form.
    """
    if lifted is None:
        return None
    if not isinstance(lifted, np.ndarray if form == "array" else bytes | bytearray | memoryview):
        raise SampleFailure("experts_invalid", f"routed experts: {type(lifted).__name__} instead of {form}")
    return RawExperts(form, lifted, start)
