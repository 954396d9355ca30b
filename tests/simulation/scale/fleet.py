"""Engines that answer when they are told to, and the transport that reaches them in no time.

Invariants:

- A request is a future and an entry in a table: what is measured is the service, not what stands in for its engines.
- Answers come when the measurement asks for them, oldest first, or at an abort; nothing else takes time.
- A turn of the loop is handed as many answers as the service's own loop would hand over (`rollout_svc/loop.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

import orjson

from rollout_svc.engines import Endpoint, Reply
from rollout_svc.engines.calls import Call
from rollout_svc.loop import SLICE

if TYPE_CHECKING:
    from rollout_svc.engines.dialect import StreamReader

__all__ = ["Fleet", "FleetTransport", "url_of"]

_OK: Final = Reply(200, b"")
_SUCCESS: Final = Reply(200, b'{"success":true}')
_TOKENS: Final = 16  # of each answer, whole or cut: what tokens cost is in bench.dispatch
_IDS: Final = b",".join([b"7"] * _TOKENS)
_LOGPROBS: Final = b",".join([b"[-0.5,7,null]"] * _TOKENS)


def url_of(engine: int) -> str:
    """Where an engine is."""
    return f"http://e{engine}:1"


def _answer(rid: str, finish: bytes, label: bytes) -> Reply:
    body = b'{"output_ids":[%b],"meta_info":{"id":"%b","finish_reason":{"type":"%b"},"weight_version":"%b",' % (
        *(_IDS, rid.encode(), finish, label),
    )
    return Reply(200, body + b'"output_token_logprobs":[%b]}}' % _LOGPROBS)


class Fleet:
    """All engines, in SGLang's dialect.

    Attributes:
        control_calls: how many were made, by path.
        control_bytes: what they carried.
        deaf: aborts are taken, and nothing comes of them, nor of connections that are closed.
    """

    def __init__(self, engines: int) -> None:
        self.running: dict[str, dict[str, asyncio.Future[Reply]]] = {url_of(n): {} for n in range(engines)}
        self.labels: dict[str, str] = dict.fromkeys(self.running, "0")
        self.control_calls: dict[str, int] = {}
        self.control_bytes = 0
        self.deaf = False
        self._order: deque[tuple[str, str]] = deque()
        self._landing: deque[tuple[asyncio.Future[Reply], str, str, bytes]] = deque()

    @property
    def count(self) -> int:
        """Requests that run."""
        return sum(map(len, self.running.values()))

    async def generate(self, url: str, body: bytes) -> Reply:
        """Run a request until it is answered."""
        rid: str = orjson.loads(body)["rid"]
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.running[url][rid] = answer
        self._order.append((url, rid))
        try:
            return await answer
        finally:
            if not self.deaf:
                self.running[url].pop(rid, None)

    def heal(self) -> None:
        """Hear again, and lose what nobody waits for any more."""
        self.deaf = False
        for running in self.running.values():
            running.clear()

    def finish(self, number: int) -> None:
        """Answer the oldest requests, whole."""
        while number and self._order:
            url, rid = self._order.popleft()
            number -= self._end(url, rid, b"stop")

    def _end(self, url: str, rid: str, finish: bytes) -> bool:
        answer = self.running[url].pop(rid, None)
        if answer is None or answer.done():
            return False
        if not self._landing:
            asyncio.get_running_loop().call_soon(self._land)
        self._landing.append((answer, url, rid, finish))
        return True

    def _land(self) -> None:
        for _ in range(min(SLICE, len(self._landing))):
            answer, url, rid, finish = self._landing.popleft()
            if not answer.done():
                answer.set_result(_answer(rid, finish, self.labels[url].encode()))
        if self._landing:
            asyncio.get_running_loop().call_soon(self._land)

    def control(self, url: str, call: Call) -> Reply:
        """Answer a control call."""
        path = call.path.partition("?")[0]
        self.control_calls[path] = self.control_calls.get(path, 0) + 1
        self.control_bytes += len(call.body or b"")
        asked = orjson.loads(call.body) if call.body else {}
        if path == "/abort_request" and self.deaf:
            return _OK
        if path == "/abort_request":
            for rid in list(self.running[url]) if asked.get("abort_all") else [asked["rid"]]:
                self._end(url, rid, b"abort")
        elif path == "/model_info":
            return Reply(200, orjson.dumps({"model_path": "scale", "weight_version": self.labels[url]}))
        elif path == "/v1/loads":
            counts = {"num_running_reqs": len(self.running[url]), "num_waiting_reqs": 0}
            return Reply(200, orjson.dumps({"loads": [counts]}))
        elif path == "/update_weight_version":
            self.labels[url] = asked["new_version"]
            return _SUCCESS
        elif path in ("/pause_generation", "/continue_generation"):
            return Reply(200, b'{"status":"ok"}')
        elif path not in ("/ping", "/flush_cache"):
            return Reply(404, b"")
        return _OK


class FleetTransport:
    """Carries calls to the fleet, without a socket and without delay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call."""
        return await self._fleet.generate(endpoint.url, call.body or b"{}")

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> NoReturn:
        """No worker here streams."""
        raise NotImplementedError

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make a control call."""
        return self._fleet.control(endpoint.url, call)

    async def close(self) -> None:
        """Nothing to close."""
