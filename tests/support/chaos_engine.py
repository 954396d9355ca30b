"""A process that speaks SGLang over real sockets and misbehaves on command: `python -m tests.support.chaos_engine`.

- It starts healthy. `POST /chaos {"fault": …}` gives it one fault at a time; that route is struck by none of them.
- A generation is held until an abort reaches it, its delay has passed, or a fault that answers at once is in force;
  one that is frozen is held until it goes on.
- What it counts as running is what it would still work on: with handler cancellation a client that leaves ends its
  generation, without it the generation goes on unheard.
- `GET /chaos/seen` tells what reached it, and when, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from typing import Any, Final

import orjson
from aiohttp import web

from bench.canned import sglang
from bench.canned.bodies import Bodies
from bench.process import PARENT_POLL_S, raise_open_files
from tests.support.face import reset_connection

__all__ = ["FAULTS", "STATUSES"]

BACKLOG: Final = 4096
LATE_S: Final = 30.0
"""How late `late` answers, in seconds."""
DRIP_S: Final = 0.5
"""Between two bytes of a slow loris, in seconds."""
STATUSES: Final = (400, 401, 403, 404, 409, 413, 422, 429, 499, 500, 501, 502, 503, 504, 529)
"""Every status that one of the three engines, or a proxy before it, is known to answer a generation with."""
FAULTS: Final = ("none", "black_hole", "late", "deaf", "slow_loris", "reset", "garbage")
"""Besides `status:NNN` and `status:all`."""
_CUT_AT_ONCE: Final = frozenset({"reset", "garbage"})
_WHOLE: Final = 16  # tokens of an answer that nobody aborted
_PARTIAL: Final = 8  # tokens of one that was
_GARBAGE: Final = b'{"text": "\xff\xfe", "output_ids": [1, 2' * 8

_Outcome = asyncio.Future[str]


class ChaosEngine:
    """What is under way, and what is wrong.

    Args:
        version: weight label it reports.
    """

    def __init__(self, version: str) -> None:
        self.fault = "none"
        self.delay_s: float | None = None
        self._bodies = Bodies(sglang.answer, response_tokens=_WHOLE, vocab=32000, weight_version=version)
        self._live: dict[str, _Outcome] = {}
        self._news = asyncio.Event()
        self._statuses = 0
        self._prompts: list[int] = []
        self._aborted_at: list[float] = []
        self._going = asyncio.Event()
        self._going.set()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._strike])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/ping", self._empty)
        for path in ("/flush_cache", "/update_weight_version"):
            app.router.add_post(path, self._empty)
        app.router.add_post("/pause_generation", self._freeze)
        app.router.add_post("/continue_generation", self._go_on)
        app.router.add_post("/chaos", self._command)
        app.router.add_get("/chaos/running", self._wait_running)
        app.router.add_get("/chaos/seen", self._tell)
        return app

    @web.middleware
    async def _strike(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The faults that strike every route but the commands."""
        if not request.path.startswith("/chaos"):
            if self.fault == "black_hole":
                await asyncio.Event().wait()
            if self.fault == "late" and request.path != "/generate":
                await asyncio.sleep(LATE_S)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        rid: str = body["rid"]
        self._prompts.append(len(body["input_ids"]))
        outcome = self._live[rid] = asyncio.get_running_loop().create_future()
        self._news.set()
        try:
            if self._at_once:
                outcome.set_result("length")
            elif self.delay_s is not None:
                asyncio.get_running_loop().call_later(self.delay_s, _end, outcome, "length")
            finish = await outcome
            await self._going.wait()
        finally:
            self._live.pop(rid, None)
            self._news.set()
        tokens = _PARTIAL if finish == "abort" else _WHOLE
        tokens = min(tokens, int(body["sampling_params"]["max_new_tokens"]))
        return await self._answer(request, self._bodies.body(tokens, finish, rid.encode(), len(body["input_ids"])))

    @property
    def _at_once(self) -> bool:
        return self.fault in _CUT_AT_ONCE or self.fault.startswith("status:")

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send an answer as the fault in force has it."""
        if self.fault in ("black_hole", "late"):  # it was let in before the fault came
            await asyncio.sleep(LATE_S if self.fault == "late" else 1e6)
        if self.fault.startswith("status:"):
            return self._refuse(self.fault.removeprefix("status:"))
        if self.fault == "garbage":
            return web.Response(body=_GARBAGE, content_type="application/json")
        if self.fault not in ("reset", "slow_loris"):
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(request)
        if self.fault == "reset":
            await response.write(body[: len(body) // 2])
            reset_connection(request.transport)
            return response
        with contextlib.suppress(ConnectionError):
            for byte in body:
                await response.write(bytes((byte,)))
                await asyncio.sleep(DRIP_S)
        return response

    def _refuse(self, wanted: str) -> web.Response:
        """One status, or each in its turn; 429 and 503 say when to come back."""
        status = STATUSES[self._statuses % len(STATUSES)] if wanted == "all" else int(wanted)
        self._statuses += 1
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return web.json_response({"error": {"message": "chaos"}}, status=status, reason="Chaos", headers=headers)

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted_at.append(time.monotonic())
        body = orjson.loads(await request.read())
        if self.fault != "deaf":
            for rid in tuple(self._live) if body.get("abort_all") else (body.get("rid"),):
                _end(self._live.get(rid), "abort")
        return web.Response()

    async def _freeze(self, request: web.Request) -> web.Response:
        """In place, whatever the mode: nothing ends here, aborted or not, before it goes on."""
        await request.read()
        self._going.clear()
        return web.Response()

    async def _go_on(self, request: web.Request) -> web.Response:
        await request.read()
        self._going.set()
        return web.Response()

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self._live), "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "chaos", "weight_version": self._bodies.weight_version})

    async def _empty(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    async def _command(self, request: web.Request) -> web.Response:
        """`fault`: from now on; `delay_s`: of generations from now on, and of those that are held."""
        body = orjson.loads(await request.read())
        self.fault = body.get("fault", self.fault)
        if "delay_s" in body:
            self.delay_s = body["delay_s"]
            for outcome in tuple(self._live.values()) if self.delay_s is not None else ():
                asyncio.get_running_loop().call_later(self.delay_s or 0.0, _end, outcome, "length")
        return web.json_response({"running": len(self._live)})

    async def _tell(self, _: web.Request) -> web.Response:
        """`prompts`: the length of each prompt in order; `aborted_at`: when each abort arrived; `frozen`: whether."""
        frozen = not self._going.is_set()
        return web.json_response({"prompts": self._prompts, "aborted_at": self._aborted_at, "frozen": frozen})

    async def _wait_running(self, request: web.Request) -> web.Response:
        """Answer once at least `least`, and at most `most`, generations run."""
        least, most = int(request.query.get("least", 0)), int(request.query.get("most", 1 << 30))
        while not least <= len(self._live) <= most:
            self._news.clear()
            await self._news.wait()
        return web.json_response({"running": len(self._live)})


def _end(outcome: _Outcome | None, finish: str) -> None:
    if outcome is not None and not outcome.done():
        outcome.set_result(finish)


async def _serve(args: argparse.Namespace) -> None:
    raise_open_files()
    engine = ChaosEngine(args.weight_version)
    engine.fault = args.fault
    runner = web.AppRunner(
        engine.application(),
        access_log=None,
        handler_cancellation=args.handler_cancellation == "on",
        shutdown_timeout=0.0,
        keepalive_timeout=3600.0,
    )
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=BACKLOG, reuse_address=True)
    await site.start()
    parent = os.getppid()
    print(f"ready {runner.addresses[0][1]}", flush=True)  # noqa: T201 - whoever started it waits for this line
    while os.getppid() == parent:  # noqa: ASYNC110 - a parent's death sends no event
        await asyncio.sleep(PARENT_POLL_S)


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="tests.support.chaos_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", default="none", help=f"{', '.join(FAULTS)}, status:NNN or status:all")
    parser.add_argument("--handler-cancellation", choices=("on", "off"), default="off")
    parser.add_argument("--weight-version", default="0")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
