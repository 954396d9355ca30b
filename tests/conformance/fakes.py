"""Faked engines as sites: the switches of the fakes, under the names the promises use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Dialect, GenerateRequest
from tests.conformance.site import OVER_A_FREEZE, SLOTS, control_paths
from tests.support.bell import WAIT_S
from tests.support.faults import Fault, Hang, Refusal
from tests.support.sglang_wire import Finish, Reply

__all__ = ["Fake", "FakeSite"]

_MAX_TOKENS: Final = 128  # more than all pauses of one test find


class Fake(Protocol):
    """What the fakes have in common."""

    answer: Callable[[Any], Reply | Fault | None] | None
    lose_aborts: Any

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def running(self) -> int:
        """Generations that run."""

    @property
    def waiting(self) -> int:
        """Generations in its queue."""

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float | None = ...) -> None:
        """Wait."""

    def release(self, call: Any = None, tokens: Any = None, finish: Finish = "stop") -> int:
        """End generations."""

    def script(self, path: str, *refusals: Refusal, times: int | None = 1) -> None:
        """Let calls of a route meet these."""

    def heal(self, path: str | None = None) -> None:
        """Forget what was scripted."""

    def notice_disconnects(self) -> int:
        """Drop those whose client has gone."""

    async def kill(self) -> None:
        """Die."""

    async def restart(self) -> None:
        """Come back as another process."""


class FakeSite:
    """A fake as a site."""

    slots = SLOTS
    pace = 1.0
    wait_s = WAIT_S
    worker: Mapping[str, Any] = {}
    kin: Mapping[str, Any] = {}

    def __init__(self, engine: Any, dialect: Dialect, capabilities: frozenset[str]) -> None:
        self.engine: Fake = engine
        self.name = f"{dialect.name}-fake"
        self.dialect = dialect
        self.capabilities = capabilities
        self.sampling: Mapping[str, Any] = {"max_tokens": _MAX_TOKENS}
        request = GenerateRequest("0" * 32, [1], 1, SamplingConfig())
        freezes = "freeze_keep_kv" in capabilities
        self.unshown: Mapping[str, str] = {} if freezes else {OVER_A_FREEZE: "it cannot freeze, and is refused by name"}
        self._door = dialect.generate(request).path

    def __repr__(self) -> str:
        return f"<FakeSite {self.engine!r}>"

    @property
    def url(self) -> str:
        """Where it is."""
        return self.engine.url

    async def wait_inside(self, count: int) -> None:
        """Wait until it holds that many requests."""
        engine = self.engine
        await engine.until(lambda: engine.running + engine.waiting >= count, f"{count} inside")

    async def own_count(self) -> int:
        """What it holds; a client that left has been noticed by now, as real engines do all the time."""
        self.engine.notice_disconnects()
        return self.engine.running + self.engine.waiting

    def finish(self) -> None:
        """Every request uses up its `max_tokens` at once from now on."""
        self.engine.answer = lambda _: Reply(finish="length")
        self.engine.release(finish="length")

    def hang(self) -> None:
        """Answer no route."""
        for path in (*control_paths(self.dialect), self._door):
            self.engine.script(path, Hang(), times=None)

    def hold_door(self) -> None:
        """Hold generations before they are taken in."""
        self.engine.script(self._door, Hang(), times=None)

    def heal(self) -> None:
        """What hangs goes on, late."""
        self.engine.heal()

    def lose_aborts(self) -> None:
        """Aborts do nothing."""
        self.engine.lose_aborts = True

    async def kill(self) -> None:
        """End, with resets."""
        await self.engine.kill()

    async def restart(self) -> None:
        """Come back at the same port, another process, empty."""
        await self.engine.restart()
