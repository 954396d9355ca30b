"""The HTTP face of the faked vLLM: routes, keys, switches. The engine itself is `vllm_core`.

- Keys come before scripts, scripts before switches, switches before the route.
- An answer of status 500 closes its connection, as the real one may.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from tests.support import vllm_wire as wire
from tests.support.face import Face, as_json, body_of, cut, plain, reset_connection, twice
from tests.support.faults import Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.group_member import GroupMember
from tests.support.routing import Routing
from tests.support.sglang_wire import Reply
from tests.support.vllm_core import Call, Core, PauseMode
from tests.support.vllm_transfer import Transfer

__all__ = ["ABORT", "GENERATE", "Routes"]

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
PROBE = wire.ID_PREFIX + "probe"
"""An id that nobody has: to name it aborts nothing, and is asked to see whether the route is there."""
VERSION = "0.32.0"
NO_LIMIT = 256
"""`max_num_seqs` that an engine without slots reports."""
MISSING = "Repo id must use alphanumeric chars"
"""How the trouble with a path that is not there begins."""
ALIVE_WITHOUT_CORE = frozenset({"/health", "/version", "/v1/models", "/metrics", "/openapi.json"})
"""What the API server answers by itself."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Core, Face):
    """Core, reachable over HTTP; its settings are those of `FakeVLLM`."""

    vocabulary: int
    model: str
    api_key: str | None
    scale_out: bool
    dev_mode: bool
    docs: bool
    log_stats: bool
    logprobs_mode: str
    processes: int
    experts: Routing | None = None
    lose_experts: bool = False
    sleep_mode: bool = False
    releases_cache: bool = False

    def __init__(self, *, slots: int | None, context: int, weight_version: str) -> None:
        super().__init__(slots=slots, context=context, weight_version=weight_version)
        self.fail_update: bool | str = False
        self.aborts: list[tuple[str, Any]] = []
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.clients: dict[Call, web.Request] = {}
        self.by_handles = Transfer("cpu", lambda whole: self.load(broken=not whole), self.set_version)
        self.member = GroupMember()
        self.transfer: str | None = None
        self.round_open = self._remains = False  # of a backend `nccl`; parts of layers that an update left behind
        self._in_round = 0

    def _transfers(self) -> dict[str, Handler]:
        """The four routes of a weight transfer, by the backend it was started with."""
        by_handles = self.by_handles.routes()
        by_group: dict[str, Handler] = {
            "/init_weight_transfer_engine": self._join_group,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update_from_group,
            "/finish_weight_update": self._finish_update,
        }

        async def chosen(request: web.Request) -> web.StreamResponse:
            return await (by_handles if self.transfer == "ipc" else by_group)[request.path](request)

        return dict.fromkeys(by_group, chosen)

    def application(self) -> web.Application:
        """Build the routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        posts: dict[str, Handler] = {
            GENERATE: self._generate,
            ABORT: self._abort_here,
            "/abort_requests": self._abort_anything,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake,
            "/release_kv_cache_memory": self._release_cache,
            "/collective_rpc": self._rpc,
            "/reset_prefix_cache": self._reset_cache,
            "/update_weight_version": self._label,
            **self._transfers(),
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/version": self._version,
            "/v1/models": self._models,
            "/openapi.json": self._openapi,
            "/metrics": self._metrics,
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_paused,
            "/weight_info": self._weight_info,
            "/server_info": self._server_info,
        }
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        self.hits.append((request.method, path))
        self.changed()
        key = self.api_key if path.startswith(wire.GUARDED) else None
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return as_json(wire.UNAUTHORIZED, 401)
        response = await self.scripted(request, self._switched(path, handler))
        if response.status == 500 and not response.prepared:
            response.force_close()
        return response

    def _switched(self, path: str, handler: Handler) -> Handler:
        async def answer(payload: Any, status: int) -> web.StreamResponse:
            return as_json(payload, status)

        absent = (path in wire.DEV_ROUTES and not self.dev_mode) or (path == "/openapi.json" and not self.docs)
        if absent:
            return lambda _: answer(wire.NOT_FOUND, 404)
        if path.startswith("/inference") and not self.scale_out:
            return lambda _: answer(wire.SCALE_OUT_OFF, 403)
        if self.dead and path not in ALIVE_WITHOUT_CORE:
            return lambda _: answer(wire.CORE_DEAD, 500)
        return handler

    # -- generations -----------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        slots = self.slots or NO_LIMIT
        problem = wire.check_generate(
            body, model=self.model, context=self.context, vocabulary=self.vocabulary, slots=slots
        )
        if problem is not None:
            return as_json(problem[1], problem[0])
        rid = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex[:16]
        call = self.submit(rid, body, dict(request.headers))
        self.clients[call] = request
        try:
            if body.get("stream"):
                return await self._stream(request, call)
            return await self._answer(request, call, await call.outcome)
        except (asyncio.CancelledError, ConnectionError):
            self.drop(call)
            raise
        finally:
            self.clients.pop(call, None)
            self.changed()

    @property
    def _routing(self) -> Routing | None:
        return None if self.lose_experts else self.experts

    def _payload(self, call: Call, reply: Reply) -> dict[str, Any]:
        versions = call.spans() if reply.weight_versions is None else reply.weight_versions
        ids = reply.ids(call.max_tokens)
        found = wire.choices(call.body, reply, ids, versions=versions, routing=self._routing)
        return wire.generation(call.engine_id, self.model, call.body, found)

    async def _answer(self, request: web.Request, call: Call, fate: Reply | Fault) -> web.StreamResponse:
        match fate:
            case Reply():
                return as_json(self._payload(call, fate))
            case Status() | Raw() | Reset():
                return plain(request, fate)
            case Mangled():
                payload = self._payload(call, fate.reply)
                wire.MANGLES[fate.how](payload)
                return as_json(payload)
            case Cut():
                return await cut(request, self._payload(call, fate.reply))
            case Twice():
                return await twice(request, self._payload(call, fate.reply))
            case Hang():
                raise AssertionError("a hang has no answer")

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        sent = 0
        while not call.outcome.done():
            await call.news.wait()
            call.news.clear()
            if not call.outcome.done() and call.tokens > sent:
                reply = Reply(tokens=call.tokens)
                await self._delta(request, response, call, reply, sent)
                sent = call.tokens
        fate = call.outcome.result()
        match fate:
            case Reply():
                await self._delta(request, response, call, fate, sent, last=True)
                if (call.body.get("stream_options") or {}).get("include_usage"):
                    usage = (len(call.prompt_ids), call.tokens)
                    await self._event(request, response, wire.chunk(call.engine_id, (), usage))
            case Cut():
                if call.tokens > sent:
                    await self._delta(request, response, call, Reply(tokens=call.tokens), sent)
                if request.transport is not None:
                    request.transport.close()  # what was written leaves first: the client has some of the events
                return response
            case Reset():
                reset_connection(request.transport)
                return response
            case Status():
                await self._event(request, response, fate.payload)
            case _ if not response.prepared:
                return await self._answer(request, call, fate)
            case _:
                await self._event(request, response, b"{not json")
        await self._event(request, response, b"[DONE]")
        return response

    async def _delta(
        self, request: web.Request, response: web.StreamResponse, call: Call, reply: Reply, first: int, *,
        last: bool = False,
    ) -> None:  # fmt: skip
        versions = (call.spans() if reply.weight_versions is None else reply.weight_versions) if last else None
        ids = reply.ids(call.max_tokens)
        found = wire.choices(
            call.body, reply, ids, first=first, versions=versions, unfinished=not last, routing=self._routing
        )
        await self._event(request, response, wire.chunk(call.engine_id, found))

    async def _event(self, request: web.Request, response: web.StreamResponse, data: Any) -> None:
        if not response.prepared:
            await response.prepare(request)
        line = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
        await response.write(b"data: " + line + b"\n\n")

    # -- control ---------------------------------------------------------------------------------------------

    async def _abort_here(self, request: web.Request) -> web.Response:
        """Abort by id, behind the key; ids are required here."""
        body = await body_of(request)
        ids = body.get("request_ids") if isinstance(body, dict) else None
        if ids is None:
            return as_json(wire.error("Missing 'request_ids' in request body", "Bad Request", 400), 400)
        if ids != [PROBE]:
            self.aborts.append((ABORT, body))
        self.abort(list(ids))
        return web.Response()

    async def _abort_anything(self, request: web.Request) -> web.Response:
        """Abort by id, or everything where no id is named: an empty list, null and no list are all the same."""
        body = await body_of(request)
        if not isinstance(body, dict):
            message = "Invalid JSON format" if body is None else "Request body must be a JSON object"
            return as_json(wire.error(message, "Bad Request", 400), 400)
        self.aborts.append(("/abort_requests", body))
        ids = body.get("request_ids")
        count = self.abort(list(ids) if ids else None)  # a string is gone through letter by letter
        return as_json({"status": "aborted", "aborted": count})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in wire.PAUSE_MODES:
            expected = "'abort', 'wait' or 'keep'"
            problem = {"type": "literal_error", "loc": "query.mode", "msg": f"Input should be {expected}"}
            status, payload = wire.invalid({**problem, "input": mode, "ctx": {"expected": expected}})
            return as_json(payload, status)
        await self.pause(cast("PauseMode", mode), clear_cache=request.query.get("clear_cache", "true") == "true")
        return as_json({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.resume()
        return as_json({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        level = int(request.query.get("level", "1"))
        self.sleep(level)
        return as_json({"status": "sleeping", "level": level})

    async def _wake(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", [])
        self.wake(tags)
        return as_json({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    async def _release_cache(self, _: web.Request) -> web.Response:
        if not self.release_cache():
            return as_json(wire.error("it has to be paused, and awake", "Internal Server Error", 500), 500)
        return as_json({"status": "kv_cache_released"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        if not isinstance(body, dict) or "method" not in body:
            return as_json(wire.error("Missing 'method' in request body", "Bad Request", 400), 400)
        self.updates.append(("/collective_rpc", body))
        if body["method"] != "reload_weights":
            return as_json(wire.rpc_failed(f"no method {body['method']}"), 500)
        self.load(broken=bool(self.fail_update))
        if self.fail_update:
            return as_json(wire.rpc_failed(MISSING if self.fail_update is True else self.fail_update), 500)
        return as_json({"results": [None]})

    async def _reset_cache(self, request: web.Request) -> web.Response:
        preempt = request.query.get("reset_running_requests", "false") == "true"
        return as_json({"success": self.reset_cache(preempt=preempt)})

    async def _join_group(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        self.updates.append((request.path, body))
        await self.member.join(body["init_info"], "vllm", warm_up=True)
        return as_json({"message": "Weight transfer initialized"})

    async def _start_update(self, request: web.Request) -> web.Response:
        self.updates.append((request.path, {}))
        if self.round_open:
            return as_json(wire.rpc_failed("start_weight_update called while one is already active."), 500)
        self.round_open, self._in_round = True, 0
        return as_json({"message": "Weight update started"})

    async def _update_from_group(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        self.updates.append((request.path, body))
        if not self.round_open:
            return as_json(wire.rpc_failed("start_weight_update must be called before update_weights."), 500)
        info, failure = body["update_info"], "broken" if self.fail_update else None
        try:
            if failure is None:
                await self.member.receive("vllm", info["names"], info["dtype_names"], info["shapes"], flat=False)
        except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
            failure = str(error)
        if failure is not None:
            self.load(broken=True)
            self.round_open, self._remains = False, True
            return as_json(wire.rpc_failed(f"Worker failed with error '{failure}'"), 500)
        self._in_round += 1
        return as_json({"message": "Weights updated"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        self.updates.append((request.path, body))
        if not self.round_open:
            return as_json(wire.rpc_failed("finish_weight_update called without a matching start."), 500)
        # What a round begins over is loaded among what it was sent, and nobody says so.
        self.load(broken=self._remains and self._in_round > 0)
        self.round_open = self._remains = False
        if body.get("weight_version") is not None:
            self.set_version(body["weight_version"])
        return as_json({"message": "Weight update finished"})

    async def _label(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        label = body.get("new_version")
        if not isinstance(label, str):
            problem = {"type": "string_type", "loc": "body.new_version", "msg": "Input should be a valid string"}
            status, payload = wire.invalid({**problem, "input": str(label)})
            return as_json(payload, status)
        self.updates.append(("/update_weight_version", body))
        self.set_version(label)
        return as_json({"success": True, "new_version": label})

    # -- looks -----------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return as_json({"version": VERSION})

    async def _models(self, _: web.Request) -> web.Response:
        return as_json(wire.models(self.model, self.model, self.context))

    async def _openapi(self, request: web.Request) -> web.Response:
        paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
        hidden = set() if self.dev_mode else set(wire.DEV_ROUTES)
        if not self.releases_cache:
            hidden.add("/release_kv_cache_memory")
        if not self.scale_out:
            hidden |= {GENERATE, ABORT}
        info = {"title": "FastAPI", "version": "0.1.0"}
        return as_json({"openapi": "3.1.0", "info": info, "paths": {path: {} for path in sorted(paths - hidden)}})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = wire.metrics(self.model, *self.gauges, self.preemptions) if self.log_stats else ""
        return web.Response(text=text)

    async def _is_paused(self, request: web.Request) -> web.Response:
        return as_json({request.path[1:]: self.paused is not None or bool(self.asleep)})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return as_json({"weight_version": self.weight_version})

    async def _server_info(self, _: web.Request) -> web.Response:
        slots = self.slots or NO_LIMIT
        config = {"logprobs_mode": self.logprobs_mode, "slots": slots, "processes": self.processes}
        config |= {"experts": self.experts is not None, "transfer": self.transfer, "sleep_mode": self.sleep_mode}
        return as_json(wire.server_info(self.model, self.context, **config))  # type: ignore[arg-type]
