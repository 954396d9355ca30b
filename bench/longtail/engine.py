"""A virtual engine that takes as long as the trace says, and the transport that reaches it in no time.

Invariants:

- It runs whatever it is sent, and remembers the most there ever were: more than its slots would have waited unseen.
- A sample's tokens come one every `TOKEN_S`; an abort keeps those that are whole.
- What a slot did is counted here, in slot-seconds, whatever becomes of the tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import orjson

from bench.longtail.trace import TOKEN_S, Trace
from rollout_svc.engines import Endpoint, Reply
from rollout_svc.engines.calls import Call

if TYPE_CHECKING:
    from rollout_svc.engines.dialect import StreamReader

__all__ = ["TracedEngine", "TracedTransport"]

_OK: Final = Reply(200, b"")
_SUCCESS: Final = Reply(200, b'{"success":true}')
_ANSWER: Final = (
    b'{"output_ids":[%b],"meta_info":{"id":"%b","finish_reason":{"type":"%b"},"weight_version":"%b",'
    b'"output_token_logprobs":[%b]}}'
)
_ROUNDING_S: Final = 1e-6
"""Tokens that are this near to their moment are there: moments are sums of floats."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that runs: what it will make, since when, and who waits."""

    rid: str
    tokens: int
    since: float
    answer: asyncio.Future[Reply]
    timer: asyncio.TimerHandle | None = None


class TracedEngine:
    """One engine in the SGLang dialect.

    Attributes:
        made: tokens it has made.
        most: requests it ever ran at once.
    """

    def __init__(self, trace: Trace) -> None:
        self.made = 0
        self.most = 0
        self._trace = trace
        self._running: dict[str, _Request] = {}
        self._label = "0"
        self._busy_s = 0.0
        self._counted_at = 0.0

    def busy_s(self) -> float:
        """Busy slot-seconds so far."""
        now = asyncio.get_running_loop().time()
        self._busy_s += len(self._running) * (now - self._counted_at)
        self._counted_at = now
        return self._busy_s

    async def generate(self, body: bytes) -> Reply:
        """Answer `/generate`: the first token of the prompt is its number, the seed its member."""
        asked = orjson.loads(body)
        ids, params = asked["input_ids"], asked["sampling_params"]
        left = self._trace.tokens[ids[0]][params["sampling_seed"]] - (len(ids) - 1)
        if not 0 < left <= params["max_new_tokens"]:
            raise RuntimeError(f"prompt {ids[0]}: {left} tokens are left, {params['max_new_tokens']} are asked for")
        loop = asyncio.get_running_loop()
        self.busy_s()
        request = _Request(asked["rid"], left, loop.time(), loop.create_future())
        request.timer = loop.call_at(request.since + left * TOKEN_S, self._end, request, b"stop")
        self._running[request.rid] = request
        self.most = max(self.most, len(self._running))
        try:
            return await request.answer
        finally:
            self._drop(request)

    def _drop(self, request: _Request) -> None:
        """Forget it, if it was not answered: its connection was closed."""
        if request.timer is not None and self._running.pop(request.rid, None) is not None:
            request.timer.cancel()

    def _end(self, request: _Request, finish: bytes) -> None:
        self.busy_s()
        del self._running[request.rid]
        if finish == b"abort":
            passed = asyncio.get_running_loop().time() - request.since
            request.tokens = min(request.tokens, int((passed + _ROUNDING_S) / TOKEN_S))
        self.made += request.tokens
        ids = b",".join([b"7"] * request.tokens)
        logprobs = b",".join([b"[-0.5,7,null]"] * request.tokens)
        body = _ANSWER % (ids, request.rid.encode(), finish, self._label.encode(), logprobs)
        if not request.answer.done():
            request.answer.set_result(Reply(200, body))

    def control(self, call: Call) -> Reply:
        """Answer a control call, at once."""
        path = call.path.partition("?")[0]
        asked = orjson.loads(call.body) if call.body else {}
        if path == "/abort_request":
            for request in [self._running[rid] for rid in self._named(asked)]:
                if request.timer is not None:
                    request.timer.cancel()
                self._end(request, b"abort")
        elif path == "/model_info":
            return Reply(200, orjson.dumps({"model_path": "trace", "weight_version": self._label}))
        elif path == "/v1/loads":
            counts = {"num_running_reqs": len(self._running), "num_waiting_reqs": 0}
            return Reply(200, orjson.dumps({"loads": [counts]}))
        elif path == "/update_weight_version":
            self._label = asked["new_version"]
            return _SUCCESS
        elif path not in ("/ping", "/flush_cache"):
            return Reply(404, b"")
        return _OK

    def _named(self, asked: dict[str, object]) -> list[str]:
        rid = str(asked.get("rid"))
        return [known for known in self._running if asked.get("abort_all") or known.startswith(rid)]


class TracedTransport:
    """Carries calls to one engine, without a socket and without delay."""

    def __init__(self, engine: TracedEngine) -> None:
        self._engine = engine

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:  # noqa: ARG002 - there is one
        """Make a generation call."""
        return await self._engine.generate(call.body or b"{}")

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> NoReturn:
        """No worker here streams."""
        raise NotImplementedError

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:  # noqa: ARG002
        """Make a control call."""
        return self._engine.control(call)

    async def close(self) -> None:
        """Nothing to close."""
