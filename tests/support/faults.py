"""What an engine can do instead of answering well, as data.

- A `Refusal` strikes before the engine accepts the call: nothing of it is recorded as a generation.
- Any `Fault` may also be the fate of an accepted generation; which ones leave it running there is said on each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.sglang_wire import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "MANGLES",
    "RUBBISH",
    "Cut",
    "Fault",
    "Hang",
    "Mangled",
    "Raw",
    "Refusal",
    "Reset",
    "Status",
    "Twice",
]


@dataclass(frozen=True, slots=True)
class Status:
    """HTTP status `code`; the generation, if it was accepted, is over. `body` None: a plausible one."""

    code: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def payload(self) -> Any:
        """The body to send."""
        return {"error": {"message": f"status {self.code} by script"}} if self.body is None else self.body


@dataclass(frozen=True, slots=True)
class Raw:
    """HTTP 200 with these bytes, whatever they are; the generation is over."""

    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset without a byte; an accepted generation runs on in the engine, unheard."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Not answered, and deaf to aborts: an accepted generation stays in the engine until it is released."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is reset in the middle of the body; the generation is over."""

    reply: Reply = field(default_factory=Reply)


@dataclass(frozen=True, slots=True)
class Mangled:
    """A whole 200 answer made wrong by `MANGLES[how]`; the generation is over."""

    how: str
    reply: Reply = field(default_factory=Reply)


@dataclass(frozen=True, slots=True)
class Twice:
    """The whole HTTP answer is sent twice on the same connection; the generation is over."""

    reply: Reply = field(default_factory=Reply)


Refusal = Status | Raw | Reset | Hang
Fault = Status | Raw | Reset | Hang | Cut | Mangled | Twice


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def mangle(body: dict[str, Any]) -> None:
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        inner.pop(path[-1], None)

    return mangle


def _meta(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def mangle(body: dict[str, Any]) -> None:
        body["meta_info"].update(fields)

    return mangle


def _first_logprob(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def mangle(body: dict[str, Any]) -> None:
        body["meta_info"]["output_token_logprobs"][0][index] = value

    return mangle


def _text_ids(body: dict[str, Any]) -> None:
    body["output_ids"] = [str(token) for token in body["output_ids"]]


MANGLES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "no output_ids": _drop("output_ids"),
    "no meta_info": _drop("meta_info"),
    "no finish_reason": _drop("meta_info", "finish_reason"),
    "no logprobs": _drop("meta_info", "output_token_logprobs"),
    "null finish_reason": _meta(finish_reason=None),
    "odd finish_reason": _meta(finish_reason={"type": "weather"}),
    "finish_reason a string": _meta(finish_reason="stop"),
    "meta_info a list": lambda body: body.update(meta_info=[]),
    "ids short": lambda body: body["output_ids"].pop(),
    "ids long": lambda body: body["output_ids"].append(7),
    "ids are text": _text_ids,
    "ids null": lambda body: body.update(output_ids=None),
    "negative id": lambda body: body["output_ids"].__setitem__(0, -1),
    "logprobs short": lambda body: body["meta_info"]["output_token_logprobs"].pop(),
    "logprobs of other ids": _first_logprob(1, 9),
    "logprob is NaN": _first_logprob(0, math.nan),
    "logprob is -Infinity": _first_logprob(0, -math.inf),
    "logprob is null": _first_logprob(0, None),
    "logprob is text": _first_logprob(0, "-1.5"),
    "logprob is positive": _first_logprob(0, 1.5),
    "other rid": _meta(id="somebody-else"),
    "completion_tokens wrong": _meta(completion_tokens=99),
}
"""Ways to make a good answer wrong, by name; each changes the decoded body in place."""

RUBBISH: Mapping[str, Fault] = {
    "not json": Raw(b"{not json"),
    "empty": Raw(b""),
    "html": Raw(b"<html>bad gateway</html>", "text/html"),
    "not utf-8": Raw(b'{"text":"\xff\xfe"}'),
    "a list": Raw(b"[]"),
    "a number": Raw(b"3"),
    "null": Raw(b"null"),
    "empty object": Raw(b"{}"),
    **{how: Mangled(how) for how in MANGLES},
}
"""Every 200 that is no answer, by name: for tests that run them all."""
