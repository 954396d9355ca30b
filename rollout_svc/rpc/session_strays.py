"""What is asked of a session and is no call of it: a path that is not there, or another method.

Agents' clients try calls that their API has and a session has not, as `/v1/messages/count_tokens`, and read the answer.

Invariants:

- It is refused in the shape of the API that was spoken, with 404, or with 405 and `Allow`; what is no path of such an
  API is refused as the control API refuses.
- It wants the same key as the calls that are there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aiohttp import web

from rollout_svc.errors import NotFound, ServiceError
from rollout_svc.rpc.calls import Site
from rollout_svc.rpc.envelope import json_answer
from rollout_svc.rpc.session_calls import find_session
from rollout_svc.sessions import anthropic, openai
from rollout_svc.sessions.refusals import headers

__all__ = ["Stray", "read", "refused"]

_PARTS: Final = 4  # of a path below a session, cut at its first three slashes
_SPOKEN: Final = "v1/"  # what the paths of such an API begin with


class Stray(NamedTuple):
    """What was asked of which session.

    Attributes:
        session_id: in the address, whether there is one or not.
        rest: of the path.
        methods: by which there is such a call, as `Allow` has it; None: there is none.
    """

    session_id: str
    rest: str
    methods: str | None


class _NotAllowed(ServiceError):
    """Raised when there is such a call, by another method."""

    status = 405
    default_type = "method_not_allowed"


def read(request: web.Request) -> Stray | None:
    """Look whether this is one; None: it is a call that is there, or lies below no session."""
    error = request.match_info.http_exception
    parts = request.path.split("/", _PARTS - 1)
    if error is None or len(parts) < _PARTS or parts[1] != "sessions" or not parts[3]:
        return None
    return Stray(parts[2], parts[3], error.headers.get("Allow"))


def refused(site: Site, request: web.Request, stray: Stray) -> web.Response:
    """Refuse it."""
    what = f"a session has no {request.method} /{stray.rest}"
    error: ServiceError = NotFound(what)
    if stray.methods is not None:
        error = _NotAllowed(f"{what}; there is one by {stray.methods}")
    try:
        find_session(site, request, stray.session_id)
    except NotFound:  # for whoever may ask of any: no session has this
        pass
    except ServiceError as instead:
        error = instead
    sent = headers(error)
    if stray.methods is not None and error.status == _NotAllowed.status:
        sent["Allow"] = stray.methods
    if not stray.rest.startswith(_SPOKEN):
        return json_answer(error.as_json(), error.status, sent)
    is_anthropic = "anthropic-version" in request.headers or stray.rest.startswith(f"{_SPOKEN}messages")
    status, body = (anthropic if is_anthropic else openai).write_error(error)
    return json_answer(body, status, sent)
