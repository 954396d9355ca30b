"""Weights into LMDeploy by `cuda_ipc`: `POST /update_weights`, which loads each bucket as it comes.

It has no label: that it holds weights of no version, nobody knows but the service.

Invariants:

- `finished` is said with a call of its own, without tensors, which the publisher made: what goes there is a pickle,
  and none is made here.
- It is said also where the update fails: the engine then forgets the buffer and the event it kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.engines.parsing import check_status
from rollout_svc.engines.updates.protocol import Ask, Opening
from rollout_svc.errors import WorkerFailure

__all__ = ["FINISH", "LMDeployUpdate"]

FINISH: Final = "finish"
"""Key of the last call's body, in what the publisher has for this engine."""


class LMDeployUpdate:
    """LMDeploy's side of one update."""

    __slots__ = ("_finish", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._finish: Mapping[str, Any] = {}

    async def open(self, ask: Ask, opening: Opening) -> None:  # noqa: ARG002 - there is nothing to be told to it
        """Take what the update will be ended with."""
        finish = opening.own.get(FINISH)
        if not isinstance(finish, dict):
            raise WorkerFailure("bad_body", f"the publisher: expected an object {FINISH!r}, not {finish!r:.100}")
        self._finish = finish

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket loaded."""
        self.touched = True
        await _post(ask, body)

    async def close(self, ask: Ask, version: int) -> None:  # noqa: ARG002 - it has no label
        """Have it do what comes after loading, and forget the buffer."""
        if not self.touched:
            raise WorkerFailure("empty", "there was nothing to load")
        await _post(ask, self._finish)
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """Have it forget the buffer; what is loaded stays."""
        if self.touched:
            await _post(ask, self._finish)


async def _post(ask: Ask, body: Mapping[str, Any]) -> None:
    check_status(await ask(Call("POST", "/update_weights", orjson.dumps(body), admin=True)))
