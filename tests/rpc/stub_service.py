"""A service written by hand: it records what it was sent and answers what it is told."""

from __future__ import annotations

from typing import Any

from aiohttp import web


class Stub:
    """A service of canned answers: `answers[path]` is a JSON body, or a function of the request."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: dict[str, Any] = {}
        self.batches = 0

    def bodies(self, path: str) -> list[Any]:
        return [body for _, called, body in self.calls if called == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.method, request.path, body))
        self.headers.append(dict(request.headers))
        answer = self.answers.get(request.path)
        if callable(answer):
            answer = await answer(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None and body is not None and request.path == "/v1/batches":
            self.batches += 1
            answer = {"batch_id": f"b{self.batches}", "step": body["step"], "groups": [], "metrics": {}}
        return web.json_response(answer or ({"workers": []} if request.path == "/v1/workers" else {}))

    def refuse(self, path: str, status: int, kind: str, detail: Any = None, **headers: str) -> None:
        async def answer(_: web.Request) -> web.Response:
            error = {"type": kind, "message": f"because {kind}", "detail": detail}
            return web.json_response({"error": error}, status=status, headers=headers)

        self.answers[path] = answer


async def serve(stub: Stub) -> web.AppRunner:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner
