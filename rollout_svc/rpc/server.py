"""Serving the control API on a socket.

Invariant: the port is bound before anything else starts, so that a port in use costs nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from rollout_svc.errors import ConfigError, InUse
from rollout_svc.rpc.app import build_app
from rollout_svc.rpc.door import Runner
from rollout_svc.service import RolloutService

__all__ = ["serve_http"]

_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound


@asynccontextmanager
async def serve_http(
    service: RolloutService, metrics: Callable[[], tuple[bytes, str]] | None = None, address: str | None = None
) -> AsyncIterator[str]:
    """Bind and serve; gives the url.

    Args:
        service: whose API it is.
        metrics: renders `/metrics`; None: there is none.
        address: of this machine, for the url where the service listens at all of its addresses; None: what is bound.

    Raises:
        InUse: at `service.port`.
        ConfigError: at `service.host` when the address cannot be bound.
    """
    config = service.config.service
    # A caller that leaves ends its own wait: takes and pauses are carried by tasks of the service.
    runner = Runner(build_app(service, metrics), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except OSError as error:
            message = f"cannot bind {config.host}:{config.port}: {error.strerror or error}"
            if "in use" in str(error):
                raise InUse.at("service.port", message) from error
            raise ConfigError.at("service.host", message) from error
        port = runner.addresses[0][1]
        told = address if address is not None and config.host in _EVERYWHERE else config.host
        host = f"[{told}]" if ":" in told else told
        url = f"http://{host}:{port}"
        service.bound = url
        yield url
    finally:
        service.bound = None
        await runner.cleanup()
