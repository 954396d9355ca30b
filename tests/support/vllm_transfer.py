"""How a faked vLLM takes weights that are handed to it: init, start, update, finish; backend `ipc`.

- A round is open from start to finish, or to an update that fails; each route refuses where that is not so.
- An update that failed leaves layers with parts of it: what a round that begins over them is sent comes to nothing,
  and nobody says so. A finish cleans up.
- A finish after less than every tensor it has leaves weights that must not be served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support import vllm_wire as wire
from tests.support.face import as_json, body_of

if TYPE_CHECKING:
    from tests.support.vllm_weights import Worker

__all__ = ["PATHS", "Transfer"]

INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
PATHS = (INIT, START, UPDATE, FINISH)


class Transfer:
    """The weights of one engine.

    Args:
        uuid: of its worker's device.
        loaded: told after each round that ended: whether it has all of its weights.
        label: told the version a finish carries.

    Attributes:
        worker: what has the weights; made by init.
        calls: the paths that were asked, in order.
        fail_at: which update of a round fails, from 0; None: none.
    """

    def __init__(self, uuid: str, loaded: Callable[[bool], None], label: Callable[[str], None]) -> None:
        self.worker: Worker | None = None
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self._uuid = uuid
        self._loaded = loaded
        self._label = label
        self._active = self._dirty = False
        self._names: set[str] = set()
        self._count = 0
        self._steps = {INIT: self._init, START: self._start, UPDATE: self._update, FINISH: self._finish}

    def routes(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        """Its handlers by path."""
        return dict.fromkeys(PATHS, self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        body = await body_of(request) if request.can_read_body else None
        try:
            told = self._steps[request.path](body)
        except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
            return as_json(wire.rpc_failed(str(error)), 500)
        return as_json({"message": told})

    def _init(self, body: Any) -> str:
        from tests.support.vllm_weights import Worker  # imports torch: only for who sends weights

        if body["init_info"].get("packed", False):
            raise ValueError("this fake reads tensors by handles of their own alone")
        self.worker = self.worker or Worker(self._uuid)
        return "Weight transfer initialized"

    def _start(self, _: Any) -> str:
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self._active, self._count = True, 0
        self._names = set()
        self._loaded(False)
        return "Weight update started"

    def _update(self, body: Any) -> str:
        if not self._active or self.worker is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        if self._count == self.fail_at:
            self._active, self._dirty = False, True
            raise ValueError("no IPC handle for this device")
        self._count += 1
        if not self._dirty:
            self.worker.update(body["update_info"])
        self._names |= set(body["update_info"]["names"])
        return "Weights updated"

    def _finish(self, body: Any) -> str:
        if not self._active or self.worker is None:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self._loaded(bool(self._names) and self._names >= self.worker.weights.keys())
        self._active = self._dirty = False
        if body and body.get("weight_version") is not None:
            self._label(body["weight_version"])
        return "Weight update finished"
