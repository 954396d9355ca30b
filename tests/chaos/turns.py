"""How long the turns of a loop are: the time from one look at the sockets to the next, the wait itself left out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["TurnMeter"]


class TurnMeter:
    """Measures the turns of a selector loop from now on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lengths: list[float] = []
        selector: Any = loop._selector  # type: ignore[attr-defined]
        look = selector.select
        since = time.perf_counter()

        def metered(timeout: float | None = None) -> Any:
            nonlocal since
            self.lengths.append(time.perf_counter() - since)
            ready = look(timeout)
            since = time.perf_counter()
            return ready

        selector.select = metered

    @property
    def longest_s(self) -> float:
        """The longest turn since the last `reset`."""
        return max(self.lengths, default=0.0)

    def reset(self) -> None:
        """Forget what was measured."""
        self.lengths.clear()
