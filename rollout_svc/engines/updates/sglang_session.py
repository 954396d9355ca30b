"""The begin and end that newer SGLang engines want around an update, and the label that goes with it.

Invariants:

- What was opened is closed, once: also where the answer to the begin was lost.
- A begin that is refused finds one that somebody left open: that one is ended first.
- An engine that has no such route has no session, and loads all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call, Reply
from rollout_svc.engines.updates.protocol import Ask

__all__ = ["ALL", "SGLangSession", "label_call"]

ALL: Final[Mapping[str, Any]] = {"selector": "all"}  # a draft model takes part
_END: Final = Call("POST", "/end_weight_update", b"{}", admin=True)
_NO_SUCH_ROUTE: Final = frozenset({404, 405})
_REFUSED: Final = 400


class SGLangSession:
    """Whether one is open at an engine, as far as this side knows."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False

    async def begin(self, ask: Ask, body: Mapping[str, Any] = ALL, *, ours_alone: bool = False) -> Reply | None:
        """Open one; returns the answer, to be looked at, or None where the engine has no such thing.

        Args:
            ask: reaches the engine.
            body: of the call.
            ours_alone: nobody else can have left one open: a refusal is for another reason.
        """
        call = Call("POST", "/begin_weight_update", orjson.dumps(body), admin=True)
        self.is_open = True  # one whose answer is lost is to be closed too
        reply = await ask(call)
        if reply.status == _REFUSED and not ours_alone:
            await ask(_END)
            reply = await ask(call)
        if reply.status in _NO_SUCH_ROUTE:
            self.is_open = False
            return None
        return reply

    async def end(self, ask: Ask) -> Reply | None:
        """Close it where it is open; returns the answer, to be looked at."""
        if not self.is_open:
            return None
        reply = await ask(_END)
        self.is_open = False
        return reply

    async def abandon(self, ask: Ask) -> None:
        """Close it, whatever the engine says."""
        if self.is_open:
            self.is_open = False
            await ask(_END)


def label_call(label: str) -> Call:
    """Give the weights a label; nothing is aborted for it, as it would be by default."""
    body = {"new_version": label, "abort_all_requests": False}
    return Call("POST", "/update_weight_version", orjson.dumps(body), admin=True)
