"""Weights in buckets through shared memory, into an engine that stages them: the built-in one.

`embedded/weight_routes.py` is its other side; SGLang names the first and the last call alike.

Invariants:

- Whatever happens between `open` and `close` changes no weights, and neither does a `close` that fails.
- The update has a name of its own in all of its calls: what another service sends to the engine is never taken for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.updates.protocol import Ask, Opening

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
        await self._post(ask, "/update_weights_from_shared_memory", body)

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
        _done(await ask(Call("POST", path, orjson.dumps({**body, "update": self._name}), admin=True)))
