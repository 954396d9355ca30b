"""The real transport, with a note of every control call that was sent, and a bell for calls of either kind."""

from __future__ import annotations

from collections.abc import Callable

from rollout_svc.engines import Call, Endpoint, HttpTransport, Reply

__all__ = ["RecordedTransport"]


class RecordedTransport(HttpTransport):
    """Notes control calls in `sent`, in order, and calls `on_sent` before any call leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Call] = []
        self.on_sent: Callable[[], None] = lambda: None

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call."""
        self.on_sent()
        return await super().data(endpoint, call)

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make a control call, noted."""
        self.sent.append(call)
        self.on_sent()
        return await super().control(endpoint, call, timeout_s)
