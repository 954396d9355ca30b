"""A real vLLM as a site of the conformance suite: hung by SIGSTOP, killed by SIGKILL, its whole process group."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any, Final

from rollout_svc.engines import Dialect, VLLMDialect
from tests.conformance.processes import ALL_CAPABILITIES
from tests.conformance.site import LOST_ABORTS
from tests.vllm.server import API_KEY, BOOT_S, SLOTS, Server
from tests.vllm.site import WAIT_S, look

__all__ = ["VLLMSite"]

_MAX_TOKENS: Final = 800  # two seconds or more: all are inside before the first has ended
_LAG_S: Final = 5.0  # by which its gauges may lag behind what it does, on cores that others use


class VLLMSite:
    """The engine as a site."""

    name = "vllm"
    slots = SLOTS
    pace = 3.0
    wait_s = 2 * WAIT_S
    capabilities = ALL_CAPABILITIES
    sampling: Mapping[str, Any] = {"max_tokens": _MAX_TOKENS, "temperature": 0.0, "extra": {"ignore_eos": True}}
    worker: Mapping[str, Any] = {"api_key": API_KEY}
    unshown: Mapping[str, str] = {LOST_ABORTS: "it loses no aborts: only a fake does"}

    def __init__(self, server: Server) -> None:
        self.dialect: Dialect = VLLMDialect()
        self.kin: Mapping[str, Any] = {"tokenizer_path": str(server.model)}
        self._server = server

    def __repr__(self) -> str:
        return f"<VLLMSite {self._server!r}>"

    @property
    def url(self) -> str:
        """Where it is."""
        return self._server.url

    async def wait_inside(self, count: int) -> None:
        """Ask it until it says so."""
        seen: list[tuple[float, float]] = []

        def inside() -> bool:
            seen.append(self._server.load())
            return sum(seen[-1]) >= count

        try:
            await look(inside, f"{count} inside", self.wait_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: running and waiting were {seen[:40]} and so on") from None

    async def own_count(self) -> int:
        """By its own gauges, which show its last step: one that is idle says so a little later."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _LAG_S
        while True:
            count = int(sum(await asyncio.to_thread(self._server.load)))
            if count == 0 or loop.time() > end:
                return count

    def finish(self) -> None:
        """They end by themselves, in seconds."""

    def hang(self) -> None:
        """Stop all its processes: the kernel goes on taking connections for it."""
        self._server.signal(signal.SIGSTOP)

    def hold_door(self) -> None:
        """The same: everything it is sent is read later."""
        self.hang()

    def heal(self) -> None:
        """Let it go on."""
        self._server.signal(signal.SIGCONT)

    def lose_aborts(self) -> None:
        """It loses none."""
        raise NotImplementedError

    async def kill(self) -> None:
        """SIGKILL, to all of them."""
        await asyncio.to_thread(self._server.kill)

    async def restart(self) -> None:
        """Start it again, at its port."""
        self._server.launch()
        await look(self._server.is_healthy, "it starts again", BOOT_S)
