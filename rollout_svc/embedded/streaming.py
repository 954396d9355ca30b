"""Streams of a generation: server-sent events, each with everything so far.

Invariants:
- An event carries all tokens made until it was written; the next is written when there are more. A client that reads
  slowly gets fewer events, not older ones.
- The last event but one is the whole answer, aborted ones included; `[DONE]` is the last.
- Nothing is sent before the first token, or the answer: what fails until then is an ordinary HTTP error.
- Whoever leaves a stream, or is cancelled in it, has its request dropped.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from rollout_svc.embedded.runner import EngineDiedError
from rollout_svc.embedded.wire import answer, answer_so_far

if TYPE_CHECKING:
    from rollout_svc.embedded.engine import Engine
    from rollout_svc.embedded.tokens import Vocabulary
    from rollout_svc.embedded.wire import Generate

DONE: Final = b"[DONE]"


async def stream(request: web.Request, wanted: Generate, engine: Engine, vocabulary: Vocabulary) -> web.StreamResponse:
    """Run a checked generate request, answering with events.

    Raises:
        RefusedError: A request with this id is in flight; nothing was sent.
        EngineDiedError: The engine has ended, and nothing was sent.
    """
    began = time.monotonic()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    sent = 0
    try:
        async with aclosing(engine.stream(wanted.job)) as news:
            async for outcome in news:
                if outcome is not None:
                    body = answer(wanted, outcome, vocabulary, time.monotonic() - began)
                elif (count := len(wanted.job.logprobs)) > sent:
                    sent = count
                    body = answer_so_far(wanted, count, engine.version, vocabulary)
                else:
                    continue
                await _send(request, response, orjson.dumps(body))
    except EngineDiedError as error:
        if not response.prepared:
            raise
        told = {"message": str(error), "type": "service_unavailable", "code": 503, "retryable": False}
        await _send(request, response, orjson.dumps({"error": told}))
    await _send(request, response, DONE)
    await response.write_eof()
    return response


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(request)
    await response.write(b"data: " + data + b"\n\n")
