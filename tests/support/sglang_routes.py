"""The HTTP face of the faked SGLang engine: routes, keys, faults on the wire. The engine itself is `sglang_core`.

- A call is recorded in `hits` before anything can strike it.
- Keys come before scripts, scripts before the route: the order in which a real server meets a call.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support import sglang_wire as wire
from tests.support.face import Face, as_json, body_of, cut, plain, reset_connection, twice
from tests.support.faults import MANGLES, Cut, Fault, Hang, Mangled, Raw, Reset, Status, Twice
from tests.support.group_member import GroupMember
from tests.support.routing import Routing
from tests.support.sglang_core import Call, Core
from tests.support.sglang_weights import load
from tests.support.sglang_wire import Reply

if TYPE_CHECKING:
    import torch

__all__ = ["Routes"]

VERSION = "0.5.23"
"""Engine version that `/server_info` and `/v1/loads` report."""
NO_LIMIT = 1 << 16
"""`max_running_requests` that an engine without slots reports."""
OPEN_ROUTES = frozenset({"/health", "/ready"})
"""Routes that take no key."""
DATA_ROUTES = frozenset({"/generate", "/model_info", "/server_info", "/v1/loads", "/v1/models", "/ping"})
"""Routes of the data key; every other guarded route takes the admin key where there is one."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Core, Face):
    """Core, reachable over HTTP. Started and stopped by its subclass."""

    api_key: str | None = None
    admin_key: str | None = None
    model_path: str
    tokenizer_path: str
    vocab_size: int | None
    context: int
    report_spans: bool = False
    experts: Routing | None = None
    lose_experts: bool = False
    fail_update: bool | str = False
    loads: tuple[int, int] | None = None
    healthy: bool = True
    update_open: bool = False  # between /begin_weight_update and /end_weight_update
    update_sessions: bool = True
    memory_deaths: int = 0

    def __init__(self, *, slots: int | None, weight_version: str) -> None:
        super().__init__(slots=slots, weight_version=weight_version)
        self.told: dict[str, Any] = {}
        self.ranks: list[dict[str, torch.Tensor]] = [{}]
        self.member = GroupMember()
        self.aborts: list[dict[str, Any]] = []
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.clients: dict[Call, web.Request] = {}

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/destroy_weights_update_group": self._leave_group,
            "/begin_weight_update": self._begin_update,
            "/end_weight_update": self._end_update,
            "/update_weight_version": self._update_version,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._resume_memory,
        }
        gets: dict[str, Handler] = {
            "/flush_cache": self._flush,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/ping": self._ping,
            "/ready": self._ready,
            "/health": self._health,
        }
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        self.hits.append((request.method, path))
        self.changed()
        key = self.api_key if path in DATA_ROUTES else self.admin_key or self.api_key
        if key is not None and path not in OPEN_ROUTES and request.headers.get("Authorization") != f"Bearer {key}":
            return as_json(wire.UNAUTHORIZED, 401)
        return await self.scripted(request, handler)

    def reset(self) -> None:
        """Lose everything, as a process that dies does."""
        self.healthy, self.update_open = True, False
        super().reset()

    # --- generations

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        problem = wire.check_generate(body, context=self.context)
        if problem is not None:
            return as_json(problem[1], problem[0])
        rid = body.get("rid") or uuid.uuid4().hex
        if rid in self.live:
            status, payload = wire.invalid(f"Duplicate request ID detected: {rid}")
            return as_json(payload, status)
        call = self.submit(rid, body, dict(request.headers))
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

    def _payload(self, call: Call, reply: Reply, *, unfinished: bool = False) -> dict[str, Any]:
        if self.report_spans and reply.weight_versions is None and not unfinished:
            reply = replace(reply, weight_versions=call.spans())
        return wire.generation(
            call.rid,
            reply,
            body=call.body,
            max_new_tokens=call.max_new_tokens,
            version=self.weight_version,
            unfinished=unfinished,
            routing=None if self.lose_experts else self.experts,
        )

    async def _answer(self, request: web.Request, call: Call, fate: Reply | Fault) -> web.StreamResponse:
        match fate:
            case Reply():
                return as_json(self._payload(call, fate))
            case Status() | Raw() | Reset():
                return plain(request, fate)
            case Mangled():
                payload = self._payload(call, fate.reply)
                MANGLES[fate.how](payload)
                return as_json(payload)
            case Cut():
                return await cut(request, self._payload(call, fate.reply))
            case Twice():
                return await twice(request, self._payload(call, fate.reply))
            case Hang():
                raise AssertionError("a hang has no answer")

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        while not call.outcome.done():
            await call.news.wait()
            call.news.clear()
            if not call.outcome.done() and call.state != "over":
                await self._event(request, response, self._payload(call, Reply(tokens=call.tokens), unfinished=True))
        fate = call.outcome.result()
        match fate:
            case Reply():
                await self._event(request, response, self._payload(call, fate))
            case Cut() | Reset():
                reset_connection(request.transport)
                return response
            case Status() if response.prepared:
                error = {"message": f"status {fate.code}", "type": "invalid_request_error", "code": fate.code}
                await self._event(request, response, {"error": {**error, "retryable": False}})
            case _ if not response.prepared:
                return await self._answer(request, call, fate)
            case _:
                await self._event(request, response, b"{not json")
        await self._event(request, response, b"[DONE]")
        return response

    async def _event(self, request: web.Request, response: web.StreamResponse, data: Any) -> None:
        if not response.prepared:
            await response.prepare(request)
        line = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
        await response.write(b"data: " + line + b"\n\n")

    # --- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        problem = wire.check_abort(body)
        if problem is not None:
            return as_json(problem[1], problem[0])
        self.aborts.append(body)
        self.abort(body.get("rid", ""), every=body.get("abort_all", False))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        problem = wire.check_pause(body)
        if problem is not None:
            return as_json(problem[1], problem[0])
        mode = body.get("mode", "abort")
        self.pause(mode)
        if mode == "abort":  # what is frozen in place cannot end before a continue: the real engine waits for it too
            await self.until(lambda: not self.busy or self.paused is None, "abort pause drained", None)
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self.resume()
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _quiet(self, *, abort_all: bool) -> None:
        """Wait as a writer does: for what runs, with new calls held back; a paused engine is quiet enough."""
        if abort_all:
            self.abort(every=True)
        if self.paused is None:
            self.draining += 1
            try:
                await self.until(lambda: not self.busy or self.paused is not None, "drained for an update", None)
            finally:
                self.draining = max(0, self.draining - 1)

    def _updated(self, path: str, body: dict[str, Any], label: Any) -> str | None:
        self.updates.append((path, body))
        if self.fail_update:
            return "Failed to update weights." if self.fail_update is True else self.fail_update
        if path != "/update_weight_version":
            self.weights_lost = False
        if label is not None:
            self.set_version(str(label))
        return None

    async def _release_memory(self, request: web.Request) -> web.Response:
        tags = (await body_of(request) or {})["tags"]
        if not self.told.get("enable_memory_saver"):
            return as_json(None)  # a no-op, and nobody is told
        if not self.give_up(tags):
            return await self._die_of_it()
        self.weights_lost |= "weights" in tags and not self.told.get("enable_weights_cpu_backup")
        return as_json(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        if not self.take_back((await body_of(request) or {})["tags"]):
            return await self._die_of_it()
        return as_json(None)

    async def _die_of_it(self) -> web.Response:
        self.memory_deaths += 1
        await self.kill()
        return web.Response()  # goes nowhere

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        await self._quiet(abort_all=body.get("abort_all_requests", False))
        label = body.get("weight_version")
        if "weights" in self.released:
            return await self._die_of_it()
        failure = self._updated("/update_weights_from_disk", body, label)
        self.fill()
        if failure is not None:
            return as_json({"success": False, "message": failure, "num_paused_requests": 0}, 400)
        self.model_path = str(body.get("model_path", self.model_path))
        message = "Succeeded to update model weights."
        if label is not None:
            message += f" Weight version updated to {label}."
        return as_json({"success": True, "message": message, "num_paused_requests": 0})

    async def _update_from_tensor(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        failure: str | None = (
            "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        )
        if self.update_open or not self.update_sessions:
            failure = self._load(body) or self._updated(request.path, body, body.get("weight_version"))
        return as_json({"success": failure is None, "message": failure or "Success"}, 400 if failure else 200)

    def _load(self, body: dict[str, Any]) -> str | None:
        """Load a flattened bucket into every rank, each from its own item; say why it failed."""
        if body.get("load_format") == "flattened_bucket":
            try:
                for index, weights in enumerate(self.ranks):
                    load(body["serialized_named_tensors"][index], weights)
            except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
                return str(error)
        return None

    async def _join_group(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        self.updates.append((request.path, body))
        try:
            await self.member.join(body, body["group_name"])
        except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
            return as_json({"success": False, "message": str(error)}, 400)
        return as_json({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _leave_group(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        self.updates.append((request.path, body))
        was = self.member.leave(body["group_name"])
        return as_json({"success": was, "message": "" if was else "no such group"}, 200 if was else 400)

    async def _update_from_distributed(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        failure: str | None = (
            "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        )
        if self.update_open or not self.update_sessions:
            tensors = (body["names"], body["dtypes"], body["shapes"])
            try:
                await self.member.receive(body["group_name"], *tensors, flat=body["load_format"] is not None)
            except Exception as error:  # noqa: BLE001 - as it is there: its words are the answer
                failure = str(error)
            else:
                failure = self._updated(request.path, body, body.get("weight_version"))
        return as_json({"success": failure is None, "message": failure or "Success"}, 400 if failure else 200)

    async def _begin_update(self, _: web.Request) -> web.Response:
        if not self.update_sessions:
            return as_json({"detail": "Not Found"}, 404)
        opened, self.update_open = not self.update_open, True
        message = "Success" if opened else "a weight update is already open"
        return as_json({"success": opened, "message": message}, 200 if opened else 400)

    async def _end_update(self, _: web.Request) -> web.Response:
        if not self.update_sessions:
            return as_json({"detail": "Not Found"}, 404)
        self.update_open = False
        return as_json({"success": True, "message": "Success"})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await body_of(request) or {}
        if body.get("abort_all_requests", True):
            self.abort(every=True)
        label = str(body.get("new_version"))
        failure = self._updated("/update_weight_version", body, label)
        if failure is not None:
            return as_json({"success": False, "message": failure, "new_version": label}, 400)
        return as_json({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def _flush(self, _: web.Request) -> web.Response:
        failed = bool(self.calls("running")) or (self.paused is None and self.busy)
        return web.Response(text=wire.FLUSH_FAILED if failed else wire.CACHE_FLUSHED, status=400 if failed else 200)

    # --- looks

    async def _model_info(self, _: web.Request) -> web.Response:
        told = wire.model_info(self.model_path, self.weight_version) | {"tokenizer_path": self.tokenizer_path}
        return as_json(told if self.vocab_size is None else told | {"vocab_size": self.vocab_size})

    async def _server_info(self, _: web.Request) -> web.Response:
        limit = self.slots or NO_LIMIT
        told = wire.server_info(
            self.model_path,
            version=VERSION,
            context=self.context,
            max_running=limit,
            experts=self.experts is not None,
        )
        return as_json(told | self.told)

    async def _models(self, _: web.Request) -> web.Response:
        return as_json({"object": "list", "data": [{"id": self.model_path, "object": "model"}]})

    async def _loads(self, _: web.Request) -> web.Response:
        running, waiting = self.loads or (len(self.calls("running")), len(self.calls("waiting")))
        return as_json(wire.loads(running, waiting, max_running=self.slots or NO_LIMIT, version=VERSION))

    async def _ping(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.paused is None else 503)

    async def _health(self, _: web.Request) -> web.Response:
        """Run a generation, as the real one does: a paused engine fails it, and then `/ping` fails too."""
        self.healthy = self.paused is None
        return web.Response(status=200 if self.healthy else 503)
