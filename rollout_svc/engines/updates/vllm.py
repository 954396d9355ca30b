"""Weights into vLLM by `cuda_ipc`: init, start, one call for each bucket, finish with the version.

| of its worker (`vllm/v1/worker/gpu_worker.py`, 0.32) | |
|---|---|
| init a second time | takes note of the wire format again, and nothing else |
| start | takes the weights off the model; while a round is open it is refused |
| update | keeps what is of a layer until all of the layer has come; one that fails closes the round |
| finish | loads what it kept, gives a layer that got nothing its weights back; without a round it is refused |

Invariants:

- From before the start until the finish the label says `loading`, and an update without a bucket never starts.
- A round is never begun over the remains of another: layers keep parts of it, which would be loaded among the new
  ones without a word. Where the label says that one ended half-way, it is brought to its end first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import LOADING, Call
from rollout_svc.engines.parsing import OK, excerpt
from rollout_svc.engines.updates.protocol import Ask, Opening
from rollout_svc.engines.vllm import VLLMDialect
from rollout_svc.errors import WorkerFailure

__all__ = ["FINISH", "VLLMUpdate", "end_remains"]

_dialect: Final = VLLMDialect()
_done: Final = _dialect.parse_done
_START: Final = Call("POST", "/start_weight_update", admin=True)
FINISH: Final = Call("POST", "/finish_weight_update", admin=True)
"""Ends a round, without a version: the label stays."""


class VLLMUpdate:
    """vLLM's side of one update."""

    __slots__ = ("_begun", "_started", "_version", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._begun = False
        self._started = False
        self._version = 0

    async def open(self, ask: Ask, opening: Opening) -> None:
        """Say how tensors will come: each by a handle of its own."""
        self._version = opening.version
        _done(await ask(_post("/init_weight_transfer_engine", {"init_info": {"packed": False}})))
        self.touched = await end_remains(ask)

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket loaded, or kept."""
        if not self._begun:
            self._begun = self.touched = True
            _done(await ask(_post("/update_weight_version", {"new_version": f"{LOADING}{self._version}"})))
            self._started = True  # one whose answer is lost is to be ended too
            _done(await ask(_START))
        _done(await ask(_post("/update_weights", {"update_info": body})))

    async def close(self, ask: Ask, version: int) -> None:
        """Have what was kept loaded, and all of it labelled."""
        if not self._begun:
            raise WorkerFailure("empty", "there was nothing to load")
        _done(await ask(_post("/finish_weight_update", {"weight_version": str(version)})))
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """End the round, so that the model has weights again, of whatever version; the label says so."""
        if self._started:
            self._started = False
            await ask(FINISH)


async def end_remains(ask: Ask) -> bool:
    """Bring what another update left to its end; returns whether there was any.

    Raises:
        WorkerFailure: it cannot be done.
    """
    if not _dialect.parse_info(await ask(_dialect.info())).half_loaded:
        return False
    reply = await ask(FINISH)
    if reply.status == OK:
        return True
    _done(await ask(_START))  # the call that failed has closed the round, and left the layers as they were
    reply = await ask(FINISH)
    if reply.status != OK:
        words = "weights began to load there and never ended, and it cannot be brought to an end: restart it"
        raise WorkerFailure("half_loaded", f"{words}: {excerpt(reply)}")
    return True


def _post(path: str, body: Mapping[str, Any]) -> Call:
    return Call("POST", path, orjson.dumps(body), admin=True)
