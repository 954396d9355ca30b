"""Weights into SGLang by `cuda_ipc`: `POST /update_weights_from_tensor`, which loads each bucket as it comes.

Newer engines ask for a begin and an end around the buckets, and refuse a begin while one is open: a sender that died
left it so.

Invariants:

- What was opened is closed, however the update ends; what somebody else left open is closed before.
- From before the first bucket until all of them are loaded the label says `loading`: who looks then, and after a
  crash of this service, knows that these weights are of no version.
- An update without a bucket changes nothing, the label included.
- No call flushes the cache (it would fail after the weights have changed, where anything waits) or aborts anything:
  that is the bodies' part, which are the publisher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import LOADING, Call
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.updates.protocol import Ask, Opening
from rollout_svc.errors import WorkerFailure

__all__ = ["SGLangUpdate"]

_done: Final = SGLangDialect().parse_done
_BEGIN: Final = Call("POST", "/begin_weight_update", b'{"selector":"all"}', admin=True)  # a draft model takes part
_END: Final = Call("POST", "/end_weight_update", b"{}", admin=True)
_NO_SUCH_ROUTE: Final = frozenset({404, 405})
_REFUSED: Final = 400


class SGLangUpdate:
    """SGLang's side of one update."""

    __slots__ = ("_open", "_version", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._open = False
        self._version = 0

    async def open(self, ask: Ask, opening: Opening) -> None:
        """Begin, where the engine has such a thing."""
        self._version = opening.version
        self._open = True  # one whose answer is lost is to be closed too
        reply = await ask(_BEGIN)
        if reply.status == _REFUSED:  # somebody left one open
            await ask(_END)
            reply = await ask(_BEGIN)
        if reply.status in _NO_SUCH_ROUTE:
            self._open = False
            return
        _done(reply)

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket loaded."""
        if not self.touched:
            self.touched = True
            _done(await ask(_label(f"{LOADING}{self._version}")))
        _done(await ask(Call("POST", "/update_weights_from_tensor", orjson.dumps(body), admin=True)))

    async def close(self, ask: Ask, version: int) -> None:
        """End it, and label the weights."""
        if not self.touched:
            await self.abandon(ask)
            raise WorkerFailure("empty", "there was nothing to load")
        if self._open:
            _done(await ask(_END))
            self._open = False
        _done(await ask(_label(str(version))))
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """End it; what is loaded stays, and the label says so."""
        if self._open:
            self._open = False
            await ask(_END)


def _label(label: str) -> Call:
    body = {"new_version": label, "abort_all_requests": False}  # true by default
    return Call("POST", "/update_weight_version", orjson.dumps(body), admin=True)
