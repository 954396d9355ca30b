"""The control API as an application: the route table, behind the token, in the one shape of errors.

Invariants:

- With a token, every route but those the table leaves open wants it, and so does what is no route; the comparison takes
  the same time for any token. Where a session's own key opens a route, its call sees to that, and
  likewise where what is no route lies below a session.
- A caller that goes away ends its own wait and nothing else.
"""

from __future__ import annotations

import hmac
from typing import Final

from aiohttp import web

from rollout_svc.rpc import session_strays
from rollout_svc.rpc.calls import Render, Site
from rollout_svc.rpc.envelope import Handler, envelope, errors, json_answer
from rollout_svc.rpc.openapi import describe
from rollout_svc.rpc.reading import read_body, read_query, wants
from rollout_svc.rpc.routes import ROUTES, Route
from rollout_svc.service import RolloutService

__all__ = ["MAX_BODY_BYTES", "build_app"]

MAX_BODY_BYTES: Final = 64 * 2**20  # of a request: prompts are pushed in lists
_OPEN_PATHS: Final = frozenset(route.path for route in ROUTES if not route.guarded)
_KEYED_PATHS: Final = frozenset(route.path for route in ROUTES if route.keyed)  # their calls look at the key
_TOKEN: Final = web.AppKey("token", str)
_SITE: Final = web.AppKey("site", Site)


def build_app(service: RolloutService, metrics: Render | None = None) -> web.Application:
    """Make the application for a service.

    Args:
        service: the service, started or about to be.
        metrics: gives the body and content type of `/metrics`.
    """
    app = web.Application(middlewares=[errors, _authorise], client_max_size=MAX_BODY_BYTES)
    app[_TOKEN] = service.config.service.token or ""
    app[_SITE] = Site(service, metrics, describe(token=bool(app[_TOKEN])))
    add = {"GET": web.get, "POST": web.post, "PUT": web.put, "DELETE": web.delete}
    app.add_routes([add[route.method](route.path, _handler(route)) for route in ROUTES])
    return app


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    strayed = session_strays.read(request)
    if strayed is not None:
        return session_strays.refused(request.app[_SITE], request, strayed)
    token = request.app[_TOKEN]
    resource = request.match_info.route.resource
    keyed = resource is not None and resource.canonical in _KEYED_PATHS
    if token and not keyed and request.path not in _OPEN_PATHS:
        given = request.headers.get("Authorization", "")
        # Headers are any bytes; those that are no UTF-8 arrive as surrogates, and must not be an error of ours.
        scheme, _, key = given.partition(" ")
        known = hmac.compare_digest(key.encode("utf-8", "surrogateescape"), token.encode())
        if not (known and scheme.lower() == "bearer"):
            return envelope("unauthorized", "this call needs the service's bearer token", 401)
    return await handler(request)


def _handler(route: Route) -> Handler:
    """Make what answers a route: read what its call is given, and send what it gives back."""

    async def handle(request: web.Request) -> web.StreamResponse:
        given: list[object] = []
        if route.keyed:
            spoken: web.StreamResponse = await route.call(request.app[_SITE], request, *request.match_info.values())
            return spoken
        if route.body is not None:
            given.append(await read_body(request, route.body))
        if route.query is not None:
            given.append(read_query(request, route.query))
        if route.media is not None:
            given.append(wants(request, route.media))
        answer = await route.call(request.app[_SITE], *given, *request.match_info.values())
        return answer if isinstance(answer, web.StreamResponse) else json_answer(answer, route.status)

    return handle
