"""The HTTP face of the faked LMDeploy server: routes, key, sleep, places. The engine itself is `lmdeploy_core`.

- A call meets, in this order: the concurrency limit, the sleep, the key, what is scripted, the route.
- What the server knows only from time to time (health, gauges) is as old as the last `poll_…`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support import lmdeploy_wire as wire
from tests.support.face import Face, as_json, body_of, cut, plain, reset_connection, twice
from tests.support.faults import MANGLES, Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.group_member import GroupMember
from tests.support.lmdeploy_core import Call, Core
from tests.support.lmdeploy_weights import Rank
from tests.support.sglang_wire import Reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.routing import Routing

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["Routes"]

OPEN_PREFIXES = ("/health", "/docs", "/redoc", "/nodes")
"""Paths that take no key."""
LEVELS = ("1", "2")
"""Levels of sleep."""
PLACED = web.RequestKey("placed", bool)
"""On a call that holds one of the `max_concurrent` places."""


class Routes(Core, Face):
    """Core, reachable over HTTP; its switches are set by its subclass."""

    context: int
    api_key: str | None = None
    model: str
    abort_handling: bool
    logprobs: bool
    pytorch: bool
    docs: bool
    metrics: bool
    experts: Routing | None = None
    lose_experts: bool = False
    max_concurrent: int | None = None

    def __init__(self, *, slots: int | None) -> None:
        super().__init__(slots=slots)
        self.health: str | None = None
        self.fail_update = False
        self.share_experts: Callable[[Any], str] | None = None
        self.aborts: list[dict[str, Any]] = []
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.ranks = [Rank()]
        self.member = GroupMember()
        self.clients: dict[Call, web.Request] = {}
        self.life = 0
        self.in_work = 0
        self._snapshot = "healthy"
        self._gauges = (0, 0)

    def poll_health(self) -> None:
        """Let the monitor look: `/health` tells what it found last."""
        self._snapshot = self.health or ("sleeping" if self.asleep else "healthy")

    def poll_gauges(self) -> None:
        """Let the gauges of `/metrics` catch up, as they do every 10 s."""
        self._gauges = (self.running, self.waiting)

    def reset(self) -> None:
        """Lose everything, as a process that dies does."""
        super().reset()
        self.health, self.life, self._snapshot, self._gauges = None, self.life + 1, "healthy", (0, 0)

    # --- the way in

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._limit, self._guard], client_max_size=1 << 30)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/sleep": self._sleep,
            "/wakeup": self._wakeup,
            "/update_weights": self._update_weights,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/destroy_weights_update_group": self._leave_group,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/is_sleeping": self._is_sleeping,
            "/v1/models": self._models,
            "/distserve/engine_info": self._engine_info,
            "/openapi.json": self._openapi,
            "/metrics": self._metrics,
        }
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Wait for one of the `max_concurrent` places, whatever the route; a stream gives it back with its head."""
        self.hits.append((request.method, request.path))
        self.changed()
        life = self.life
        await self.until(lambda: self._has_place() or self.life != life, "a place", None)
        if self.life != life:
            reset_connection(request.transport)
            return web.Response()  # goes nowhere: the process that took this call is gone
        self.in_work += 1
        request[PLACED] = True
        try:
            return await handler(request)
        finally:
            self._give_place_back(request)

    def _has_place(self) -> bool:
        return self.max_concurrent is None or self.in_work < self.max_concurrent

    def _give_place_back(self, request: web.Request) -> None:
        if request.pop(PLACED, False):
            self.in_work -= 1
            self.changed()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/generate" and self.asleep:
            return _problem(wire.ASLEEP)
        key = self.api_key
        known = key is None or request.headers.get("Authorization") == f"Bearer {key}"
        if not known and not request.path.startswith(OPEN_PREFIXES):
            return _problem(wire.error(401, "Unauthorized."))
        try:
            return await self.scripted(request, handler)
        except web.HTTPNotFound:
            return as_json({"detail": "Not Found"}, 404)

    # --- generations

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            return _problem(wire.error(400, wire.NOT_JSON))
        body = await body_of(request)
        problem = wire.check_generate(
            body,
            context=self.context,
            logprobs=self.logprobs,
            experts=self.experts is not None,
            occupied=self.sessions,
        )
        if problem is not None:
            return _problem(problem)
        call = self.submit(body, dict(request.headers))
        if call is None:
            return _uncaught()
        self.clients[call] = request
        try:
            if body.get("stream"):
                return await self._stream(request, call)
            fate = await call.outcome
        except (asyncio.CancelledError, ConnectionError):
            self.drop(call)
            raise
        finally:
            self.clients.pop(call, None)
        return await self._answer(request, call, fate)

    def _whole(self, call: Call, reply: Reply) -> dict[str, Any]:
        routing = None if self.lose_experts else self.experts
        return wire.generation(call.body, reply, routing=routing, share=self.share_experts)

    async def _answer(self, request: web.Request, call: Call, fate: Reply | Fault) -> web.StreamResponse:
        match fate:
            case Reply():
                return as_json(self._whole(call, fate))
            case Status() | Raw() | Reset():
                return plain(request, fate)
            case Mangled():
                payload = self._whole(call, fate.reply)
                MANGLES[fate.how](payload)
                return as_json(payload)
            case Cut():
                return await cut(request, self._whole(call, fate.reply))
            case Twice():
                return await twice(request, self._whole(call, fate.reply))
            case Hang():
                raise AssertionError("a hang has no answer")

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Chunks of new ids; the last has the finish reason and no id, or the stop token's where that was asked for."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._give_place_back(request)
        sent = 0
        while not call.outcome.done():
            await call.news.wait()
            call.news.clear()
            if not call.outcome.done() and call.tokens > sent:
                ids, logprobs = wire.kept(Reply(tokens=call.tokens, finish="length"), call.body)
                await _event(response, wire.chunk(call.body, ids[sent:], logprobs[sent:], made=call.tokens))
                sent = call.tokens
        fate = call.outcome.result()
        match fate:
            case Reply():
                await self._end(response, call, fate, sent)
            case Cut() | Reset():
                reset_connection(request.transport)
                return response
            case Status():
                await _event(response, {"error": wire.error(fate.code, "status by script")[1]})
            case Mangled():
                payload = self._whole(call, fate.reply)
                MANGLES[fate.how](payload)
                await _event(response, payload)
            case _:
                await _event(response, b"{not json")
        await _event(response, b"[DONE]")
        return response

    async def _end(self, response: web.StreamResponse, call: Call, reply: Reply, sent: int) -> None:
        whole = self._whole(call, reply)
        ids, pairs = whole["output_ids"], whole["meta_info"]["output_token_logprobs"] or []
        stop = int(reply.finish == "stop" and bool(call.body.get("include_stop_str_in_output")) and bool(ids))
        if len(ids) - stop > sent:
            new = slice(sent, len(ids) - stop)
            logprobs = [value for value, _ in pairs[new]] or [0.0] * len(ids[new])
            await _event(response, wire.chunk(call.body, ids[new], logprobs, made=len(ids) - stop))
        tail = slice(len(ids) - stop, len(ids))
        whole["output_ids"] = ids[tail]
        whole["meta_info"]["output_token_logprobs"] = pairs[tail] or None
        await _event(response, whole)

    # --- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        problem = wire.check_abort(body)
        if problem is not None:
            return _problem(problem)
        if not self.abort_handling:
            return web.Response(text=wire.ABORT_IS_OFF, status=501)
        if body.get("abort_all", False):
            self.abort_all()
        elif not self.abort(body.get("session_id", -1)):
            return _problem(wire.error(400, f"Session {body.get('session_id', -1)} not found."))
        self.aborts.append(body)
        self.changed()
        return web.Response()

    async def _sleep(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return _problem(wire.error(400, wire.NOT_JSON))
        if request.query.get("level", "1") not in LEVELS:
            return _problem(wire.error(400, 'The "level" query parameter must be 1 or 2.'))
        self.sleep(int(request.query.get("level", "1")))
        for rank in self.ranks:
            rank.drop()
        return web.Response()

    async def _wakeup(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return _problem(wire.error(400, wire.NOT_JSON))
        self.wake(request.query.getall("tags", []))
        return web.Response()

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        problem = wire.check_update(body, "serialized_named_tensors")
        if problem is not None:
            return _problem(problem)
        self.updates.append((request.path, body))
        if self.fail_update or body.get("load_format") not in {None, "flattened_bucket"}:
            return _uncaught()
        if body.get("load_format") is not None:
            try:
                self._load(body["serialized_named_tensors"], finished=bool(body.get("finished", False)))
            except Exception:  # noqa: BLE001 - as it is there: nobody catches it
                return _uncaught()
        return as_json(None)

    async def _join_group(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        self.updates.append((request.path, body))
        try:
            await self.member.join(body, body["group_name"])
        except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
            return _told(str(error))
        return _told(None)

    async def _leave_group(self, request: web.Request) -> web.Response:
        if not self.pytorch:
            return as_json({"detail": "Not Implemented"}, 501)
        name = (await body_of(request))["group_name"]
        return _told(None if self.member.leave(name) else f"group {name!r} not initialized")

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        self.updates.append((request.path, body))
        if self.fail_update:
            return _told("Failed to update parameter online")
        if body["names"]:
            tensors = (body["names"], body["dtypes"], body["shapes"])
            try:
                await self.member.receive(body["group_name"], *tensors, flat=body["load_format"] is not None)
            except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
                return _told(str(error))
        return _told(None)

    def _load(self, serialized: str | list[str], *, finished: bool) -> None:
        """Each rank reads its own of a list, and all of them the one string."""
        for index, rank in enumerate(self.ranks):
            rank.update(serialized if isinstance(serialized, str) else serialized[index], finished=finished)

    # --- looks

    async def _health(self, _: web.Request) -> web.Response:
        if self._snapshot == "unhealthy":  # the only state it looks at again before it says so
            self.poll_health()
        found = self._snapshot
        words = "Engine is healthy." if found == "healthy" else f"Engine is {found}."
        return as_json({"status": found, "message": words}, 200 if found in {"healthy", "sleeping"} else 503)

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return as_json({"is_sleeping": bool(self.asleep)})

    async def _models(self, _: web.Request) -> web.Response:
        return as_json(wire.models(self.model))

    async def _engine_info(self, _: web.Request) -> web.Response:
        return as_json(f'{{"tp_size":{len(self.ranks)},"dp_size":1}}') if self.pytorch else _uncaught()

    async def _openapi(self, _: web.Request) -> web.Response:
        return as_json(wire.openapi()) if self.docs else as_json({"detail": "Not Found"}, 404)

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.metrics:
            return as_json({"detail": "Not Found"}, 404)
        running, waiting = self._gauges
        text = wire.metrics(restarts=self.restarts, running=running, waiting=waiting, model=self.model)
        return web.Response(text=text)


def _problem(problem: wire.Problem) -> web.Response:
    status, payload = problem
    return as_json(payload, status)


def _told(failure: str | None) -> web.Response:
    return as_json({"success": failure is None, "message": failure or "Succeeded"}, 200 if failure is None else 400)


def _uncaught() -> web.Response:
    """An error nobody caught: text, and the connection is closed."""
    response = web.Response(text="Internal Server Error", status=500)
    response.force_close()
    return response


async def _event(response: web.StreamResponse, data: Any) -> None:
    line = data if isinstance(data, bytes) else as_json(data).body
    assert isinstance(line, bytes)
    await response.write(b"data: " + line + b"\n\n")
