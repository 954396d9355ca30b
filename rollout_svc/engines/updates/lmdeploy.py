"""Weights into LMDeploy by `cuda_ipc`: `POST /update_weights`, which loads each bucket as it comes.

It has no label: that it holds weights of no version, nobody knows but the service.

Invariants:

- `finished` is said with a call of its own, without tensors, which the publisher made: what goes there is a pickle,
  and none is made here.
- A bucket that came with an event and was answered by an error may be had without: which of the two it was, an engine
  that answers a bare 500 does not say. That it came with one is the publisher's word to us, and not sent on.
- It is said also where the update fails: the engine then forgets the buffer and the event it kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.engines.parsing import check_status, excerpt
from rollout_svc.engines.updates.protocol import NO_EVENT, Ask, Opening
from rollout_svc.errors import WorkerFailure

__all__ = ["FINISH", "WITH_EVENT", "LMDeployUpdate"]

FINISH: Final = "finish"
"""Key of the last call's body, in what the publisher has for this engine."""
WITH_EVENT: Final = "with_event"
"""Key of the publisher's word that a bucket comes with an event."""
_FAILED: Final = 500
"""Status of whatever goes wrong there."""


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
        sent = {key: value for key, value in body.items() if key != WITH_EVENT}
        reply = await ask(_call(sent))
        if reply.status == _FAILED and body.get(WITH_EVENT) is True:
            raise WorkerFailure(NO_EVENT, f"under an event: HTTP {reply.status}: {excerpt(reply)}")
        check_status(reply)

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
    check_status(await ask(_call(body)))


def _call(body: Mapping[str, Any]) -> Call:
    return Call("POST", "/update_weights", orjson.dumps(body), admin=True)
