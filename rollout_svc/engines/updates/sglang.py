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
from rollout_svc.engines.updates.sglang_session import SGLangSession, label_call
from rollout_svc.errors import WorkerFailure

__all__ = ["SGLangUpdate"]

_done: Final = SGLangDialect().parse_done


class SGLangUpdate:
    """SGLang's side of one update."""

    __slots__ = ("_session", "_version", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._session = SGLangSession()
        self._version = 0

    async def open(self, ask: Ask, opening: Opening) -> None:
        """Begin, where the engine has such a thing."""
        self._version = opening.version
        if (begun := await self._session.begin(ask)) is not None:
            _done(begun)

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket loaded."""
        if not self.touched:
            self.touched = True
            _done(await ask(label_call(f"{LOADING}{self._version}")))
        _done(await ask(Call("POST", "/update_weights_from_tensor", orjson.dumps(body), admin=True)))

    async def close(self, ask: Ask, version: int) -> None:
        """End it, and label the weights."""
        if not self.touched:
            await self.abandon(ask)
            raise WorkerFailure("empty", "there was nothing to load")
        if (ended := await self._session.end(ask)) is not None:
            _done(ended)
        _done(await ask(label_call(str(version))))
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """End it; what is loaded stays, and the label says so."""
        await self._session.abandon(ask)
