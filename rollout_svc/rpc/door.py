"""The HTTP server's own refusals, before any route is looked for, in the shape of all others.

Invariant: whatever arrives at the port and can be answered at all is answered in the one shape: a line that is no HTTP,
headers too long, an expectation that is not known.
"""

from __future__ import annotations

import asyncio

import structlog
from aiohttp import web

from rollout_svc.rpc.envelope import envelope, of_http

__all__ = ["Runner"]

_log = structlog.get_logger("rpc")


class _Door(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not become a request, and close the connection: what follows in it means nothing."""
        _log.info("rpc.not_http", peer=request.remote, status=status, error=str(exc) if exc else message)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was under way, another cannot follow")
        kind = "internal" if status >= 500 else "bad_request"  # noqa: PLR2004 - the class of server errors
        words = (message or str(exc) or "not HTTP").strip().splitlines()[0].rstrip(":")
        response = envelope(kind, words, status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; one that was raised before any middleware saw it gets its shape here."""
        shaped = of_http(resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, shaped, start_time)


class _Server(web.Server):
    """Makes a door for every connection."""

    def __call__(self) -> _Door:
        return _Door(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application behind such doors."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,  # noqa: SLF001 - what the runner was given, handed on as it is
        )
