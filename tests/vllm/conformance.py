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

__all__ = ["Missed", "VLLMSite"]

_MAX_TOKENS: Final = 600  # more than a second, in which a pause is made
_LAG_S: Final = 5.0  # by which its gauges may lag behind what it does, on cores that others use
_LOAD: Final = ("num_requests_running", "num_requests_waiting")
_ENDED: Final = 'request_success_total finished_reason="length"'


class Missed(Exception):
    """Raised when the engine was done before it was seen at work: nothing is shown, for or against."""


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
        [self._ended] = server.metrics(_ENDED)

    def __repr__(self) -> str:
        return f"<VLLMSite {self._server!r}>"

    @property
    def url(self) -> str:
        """Where it is."""
        return self._server.url

    async def wait_inside(self, count: int) -> None:
        """Ask it until it says so; raises Missed where an answer ended before it did.

        A server without a core to itself may answer when all it had is made.
        """

        def inside() -> bool:
            running, waiting, ended = self._server.metrics(*_LOAD, _ENDED)
            if running + waiting < count and ended > self._ended:
                raise Missed(f"{running:g} run and {waiting:g} wait: {ended - self._ended:g} of {count} have ended")
            return running + waiting >= count

        await look(inside, f"{count} inside", self.wait_s)

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

    def renew(self) -> None:
        """Make it empty, and what it was when it started."""
        self._server.reset()
        [self._ended] = self._server.metrics(_ENDED)

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
        self._ended = 0.0
