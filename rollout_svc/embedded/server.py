"""The HTTP face of the engine: one route, one method.

Invariants:
- Every answer is JSON but those of `/ping`, `/health`, `/ready`, `/abort_request` (empty), `/flush_cache` (text), and
  of a `/generate` with `stream` (events).
- An abort, of a request or of all, makes the generate call answer 200 with what there is.
- A client that leaves has its request aborted.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Final

from aiohttp import web

from rollout_svc.embedded.auth import Keys
from rollout_svc.embedded.bodies import as_json, read_body, update_answer
from rollout_svc.embedded.engine import PAUSE_MODES
from rollout_svc.embedded.model import WeightsError
from rollout_svc.embedded.runner import EngineDiedError
from rollout_svc.embedded.streaming import stream
from rollout_svc.embedded.weight_routes import WEIGHT_TRANSPORTS, weight_routes
from rollout_svc.embedded.wire import (
    RefusedError,
    answer,
    invalid,
    malformed,
    need_text,
    parse_generate,
    read_flag,
    read_text,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout_svc.embedded.engine import Engine
    from rollout_svc.embedded.model import TinyConfig
    from rollout_svc.embedded.script import Script
    from rollout_svc.embedded.tokens import Vocabulary

MAX_BODY_BYTES: Final = 64 * 2**20
"""Largest request body: far above any prompt that fits a context."""

HEALTH_TIMEOUT_S: Final = 20.0
"""How long `/health` waits for the engine's thread to answer between two steps."""

BACKLOG: Final = 4096
"""Connections the kernel holds until they are accepted: a whole wave of requests may connect at once."""

FLUSHED: Final = "Cache flushed.\n"
NOT_FLUSHED: Final = "Flush cache failed.\n"


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine says of itself.

    Attributes:
        model: Name of the preset.
        tokenizer: The tokenizer's directory, or "bytes".
        config: The model's shape.
        max_running: Rows of the batch.
        seed: What the first weights were built from.
        tells_experts: Whether requests that ask for it are told their routed experts.
    """

    model: str
    tokenizer: str
    config: TinyConfig
    max_running: int
    seed: int
    tells_experts: bool = False


class EngineServer:
    """Routes over an `Engine`. Made, and used, in one event loop."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        identity: Identity,
        keys: Keys | None = None,
        script: Script | None = None,
    ) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._identity = identity
        self._keys = keys or Keys()
        self._script = script
        self._model_path = identity.model
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> str:
        """Start the engine and serve.

        Args:
            host: Address to bind.
            port: Port to bind; 0 lets the system choose.

        Returns:
            The base URL.

        Raises:
            OSError: The address cannot be bound; the engine was not started.
        """
        runner = web.AppRunner(self._application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self.engine.start()
        bound_host, bound_port, *_ = runner.addresses[0]
        return f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"

    async def close(self) -> None:
        """Answer what is in flight with what there is, then stop serving. Idempotent, safe before start."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        await self.engine.close()
        await runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
                web.post("/update_weight_version", self._update_weight_version),
                *weight_routes(self.engine),
                web.route("*", "/flush_cache", self._flush_cache),
                *(web.get(path, self._model_info) for path in ("/model_info", "/get_model_info")),
                *(web.get(path, self._server_info) for path in ("/server_info", "/get_server_info")),
                web.get("/v1/loads", self._loads),
                web.get("/ping", self._ping),
                *(web.get(path, self._health) for path in ("/health", "/health_generate")),
                web.get("/ready", self._ready),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key, and turn refusals into answers."""
        if not self._keys.admits(request.path, request.headers.get("Authorization")):
            return as_json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except RefusedError as refused:
            return as_json(refused.body, refused.status)
        except EngineDiedError as error:
            return as_json({"error": {"message": str(error)}}, 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()
        identity, config = self._identity, self._identity.config
        body = await read_body(request)
        wanted = parse_generate(
            body,
            self._vocabulary,
            vocab_size=config.vocab_size,
            context=config.context,
            experts=identity.tells_experts,
        )
        if self._script is not None:
            wanted.job.script = self._script.scripted(wanted.job.prompt)
        if wanted.stream:
            return await stream(request, wanted, self.engine, self._vocabulary)
        outcome = await self.engine.generate(wanted.job)
        return as_json(answer(wanted, outcome, self._vocabulary, time.monotonic() - began))

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        rid, everything = read_text(body, "rid"), read_flag(body, "abort_all", default=False)
        if everything:
            self.engine.abort_all()
        elif rid:
            self.engine.abort(rid)
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        wanted = read_text(await read_body(request), "mode")
        mode = next((name for name in PAUSE_MODES if name == (wanted or "abort")), None)
        if mode is None:
            known = ", ".join(f"'{name}'" for name in PAUSE_MODES)
            raise malformed(f"1 validation error: body.mode: must be one of {known}; got {wanted!r}")
        await self.engine.pause(mode)
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await read_body(request)
        await self.engine.resume()
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        path, version = need_text(body, "model_path"), read_text(body, "weight_version")
        load_format = read_text(body, "load_format")
        read_flag(body, "flush_cache", default=True)  # nothing is cached between requests: either value is honoured
        if load_format not in {None, "auto", "safetensors"}:
            raise RefusedError(update_answer(f"load_format {load_format!r} is not supported by this engine."))
        try:
            abort_running = read_flag(body, "abort_all_requests", default=False)
            await self.engine.load(path, version, abort_running=abort_running)
        except WeightsError as error:
            raise RefusedError(update_answer(f"Failed to update model weights: {error}")) from error
        self._model_path = path
        label = f" Weight version updated to {version}." if version is not None else ""
        return as_json(update_answer(f"Succeeded to update model weights.{label}", success=True))

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        version = need_text(body, "new_version")
        await self.engine.relabel(version, abort_running=read_flag(body, "abort_all_requests", default=True))
        return as_json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if request.method not in {"GET", "POST"}:
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST"])
        try:
            timeout_s = float(request.query.get("timeout", "0"))
        except ValueError:
            raise invalid(f"timeout must be a number of seconds, got {request.query['timeout']!r}.") from None
        if self.engine.busy and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.engine.door.emptied()
            except TimeoutError:
                pass
        if self.engine.busy:
            return web.Response(text=NOT_FLUSHED, status=400)
        return web.Response(text=FLUSHED)

    async def _model_info(self, _: web.Request) -> web.Response:
        identity, config = self._identity, self._identity.config
        return as_json(
            {
                "model_path": self._model_path,
                "served_model_name": identity.model,
                "tokenizer_path": identity.tokenizer,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": "auto",
                "model_type": identity.model,
                "architectures": ["TinyTransformer"],
                "vocab_size": config.vocab_size,
                "context_length": config.context,
                "eos_token_id": self._vocabulary.end_id,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        identity, config = self._identity, self._identity.config
        return as_json(
            {
                "version": _package_version(),
                "engine": "rollout_svc.embedded",
                "model_path": self._model_path,
                "served_model_name": identity.model,
                "tokenizer_path": identity.tokenizer,
                "context_length": config.context,
                "max_running_requests": identity.max_running,
                "max_total_num_tokens": identity.max_running * config.context,
                "random_seed": identity.seed,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "weight_version": self.engine.version,
                "pause_modes": list(PAUSE_MODES),
                "weight_transports": list(WEIGHT_TRANSPORTS),
                "weight_staging_bytes": self.engine.staging_bytes,
                "enable_return_routed_experts": identity.tells_experts,
                **(config.routing() if config.moe_layers else {}),
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        identity, running, waiting = self._identity, self.engine.running, self.engine.waiting
        load = {
            "dp_rank": 0,
            "timestamp": time.time(),
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "max_running_requests": identity.max_running,
            "max_total_num_tokens": identity.max_running * identity.config.context,
            "utilization": running / identity.max_running,
        }
        return as_json({"timestamp": datetime.now(UTC).isoformat(), "version": _package_version(), "loads": [load]})

    async def _ping(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.thread.alive else 503)

    async def _health(self, _: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.engine.thread.call(lambda: None)
        except (TimeoutError, EngineDiedError):
            return web.Response(status=503)
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.thread.alive and not self.engine.door.paused else 503)


def _package_version() -> str:
    try:
        return metadata.version("rollout-svc")
    except metadata.PackageNotFoundError:
        return "0"
