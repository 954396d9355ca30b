"""Takes big values out of answers the slow way: the body is parsed as a whole, where the service never would."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson

from rollout_svc.engines import Call, Endpoint, HttpTransport, Lift, Reply, StreamReader

__all__ = ["LiftingTransport", "lift"]


class LiftingTransport(HttpTransport):
    """Lifts where the transport below has not."""

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call."""
        reply = await super().data(endpoint, call)
        if call.lift is None or reply.lifted is not None:
            return reply
        body, lifted = lift(reply.body, call.lift)
        return reply._replace(body=body, lifted=lifted)

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> Reply:
        """Make a generation call whose answer comes in parts."""
        if call.lift is None:
            return await super().stream(endpoint, call, reader)
        between = _Between(reader, call.lift)
        reply = await super().stream(endpoint, call, between)
        return reply if reply.lifted is not None else reply._replace(lifted=between.lifted)


class _Between:
    """Lifts from each event what the reader would have got."""

    def __init__(self, reader: StreamReader, wanted: Lift) -> None:
        self._reader = reader
        self._wanted = wanted
        self.lifted: Any = None

    def feed(self, payload: bytes) -> None:
        payload, lifted = lift(payload, self._wanted)
        self.lifted = lifted if lifted is not None else self.lifted
        self._reader.feed(payload)

    def completion(self) -> Any:
        return self._reader.completion()

    def partial(self) -> Any:
        return self._reader.partial()


def lift(body: bytes, wanted: Lift) -> tuple[bytes, Any]:
    """Take a value out of a body: what is left, and what it was; None where it was not there."""
    try:
        parsed = orjson.loads(body)
    except ValueError:
        return body, None
    found: list[Any] = []
    _take(parsed, wanted.key, found)
    value = found[-1] if found else None
    if isinstance(value, str) and wanted.encoding == "base64":
        value = base64.b64decode(value)
    elif isinstance(value, list):
        value = np.asarray(value)
    return orjson.dumps(parsed), value


def _take(value: Any, key: str, found: list[Any]) -> None:
    if isinstance(value, dict):
        if value.get(key) is not None:
            found.append(value[key])
            value[key] = None
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict | list):
                _take(inner, key, found)
