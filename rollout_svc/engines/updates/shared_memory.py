"""Weights in buckets through shared memory, into an engine that stages them: the built-in one.

`embedded/weight_routes.py` is its other side; SGLang names the first and the last call alike.

Invariants:

- Whatever happens between `open` and `close` changes no weights, and neither does a `close` that fails.
- An engine that cannot open the event of a buffer says so, and has forgotten that buffer: the failure is NO_EVENT.
- The update has a name of its own in all of its calls: what another service sends to the engine is never taken for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call, Reply
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.updates.protocol import NO_EVENT, Ask, Opening
from rollout_svc.errors import WorkerFailure

__all__ = ["SharedMemoryUpdate"]

_done: Final = SGLangDialect().parse_done


class SharedMemoryUpdate:
    """The built-in engine's side of one update."""

    __slots__ = ("_name", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._name = secrets.token_hex(8)

    async def open(self, ask: Ask, opening: Opening) -> None:
        """With a manifest, what will come is checked against the model, whole, before anything is sent."""
        body: dict[str, Any] = {"check_finite": opening.check_finite}
        if opening.manifest is not None:
            body["manifest"] = opening.manifest
        await self._post(ask, "/begin_weight_update", body)

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket staged."""
        call = Call("POST", "/update_weights_from_shared_memory", self._body(body), admin=True)
        reply = await ask(call)
        try:
            _done(reply)
        except WorkerFailure as failure:
            if _is_about_its_event(reply):
                raise WorkerFailure(NO_EVENT, failure.message) from failure
            raise

    async def close(self, ask: Ask, version: int) -> None:
        """Swap in what was staged, and label it."""
        await self._post(ask, "/end_weight_update", {"weight_version": str(version)})

    async def revert(self, ask: Ask, version: int) -> None:
        """Swap back what was swapped out, and label it."""
        await self._post(ask, "/revert_weight_update", {"weight_version": str(version)})

    async def abandon(self, ask: Ask) -> None:
        """Forget what was staged."""
        await self._post(ask, "/abandon_weight_update", {})

    async def _post(self, ask: Ask, path: str, body: Mapping[str, Any]) -> None:
        _done(await ask(Call("POST", path, self._body(body), admin=True)))

    def _body(self, body: Mapping[str, Any]) -> bytes:
        return orjson.dumps({**body, "update": self._name})


def _is_about_its_event(reply: Reply) -> bool:
    try:
        body = orjson.loads(reply.body)
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("kind") == "event"
