"""An engine as the promises of stopping meet it: something that holds requests, and can be made to misbehave.

- A site is faked or real; what a promise asks of it can be had from both. What cannot be shown at one, it says by name.
- Whatever is done to it is undone by `heal`, so that a real one may serve many tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from rollout_svc.engines import Call, Dialect

__all__ = ["LOST_ABORTS", "OVER_A_FREEZE", "SLOTS", "Site", "control_paths"]

SLOTS: Final = 4
"""Requests a site decodes together where that can be chosen; the rest waits in its queue."""
OVER_A_FREEZE: Final = "test_an_abort_over_a_freeze_takes_effect"
LOST_ABORTS: Final = "test_lost_aborts_are_named"


class Site(Protocol):
    """One engine under test.

    Attributes:
        name: of the test's case.
        dialect: to ask it with, and its name for the configuration.
        capabilities: what registration is to find.
        sampling: the task's settings, under which a request uses its whole `max_tokens` unless it is stopped.
        slots: requests it decodes together.
        pace: how many times longer than a fake it may take to obey: deadlines are stretched by it.
        wait_s: seconds within which whatever is waited for has come.
        worker: further keys of its worker in the configuration.
        kin: what a `FakeSGLang` has to say of itself to be let in beside it.
        unshown: promises that cannot be shown here, by the name of their test, and why.
    """

    name: str
    dialect: Dialect
    capabilities: frozenset[str]
    sampling: Mapping[str, Any]
    slots: int
    pace: float
    wait_s: float
    worker: Mapping[str, Any]
    kin: Mapping[str, Any]
    unshown: Mapping[str, str]

    @property
    def url(self) -> str:
        """Where it is."""

    async def wait_inside(self, count: int) -> None:
        """Wait until it holds that many requests, running or in its queue."""

    async def own_count(self) -> int:
        """What it holds, by its own count, or by a look inside where it cannot count."""

    def finish(self) -> None:
        """Let what it holds, and what comes, end whole by itself."""

    def hang(self) -> None:
        """Take connections and answer nothing any more."""

    def hold_door(self) -> None:
        """Take generation requests off the wire late: after `heal`."""

    def heal(self) -> None:
        """End `hang` and `hold_door`; what it was sent meanwhile is read now."""

    def lose_aborts(self) -> None:
        """Answer aborts well and do nothing."""

    async def kill(self) -> None:
        """End it as SIGKILL does: what it held is lost."""

    async def restart(self) -> None:
        """Start it again, empty, at the same url."""


def control_paths(dialect: Dialect) -> frozenset[str]:
    """The paths of every control call a dialect makes, without their queries."""
    calls: list[Call] = [dialect.ping(), dialect.info(), *dialect.probe(), *dialect.abort(None)]
    calls += dialect.abort(["0" * 32])
    for build in (dialect.loads, dialect.thaw, lambda: dialect.freeze("keep"), lambda: dialect.freeze("drop")):
        try:
            built = build()
        except Exception:  # noqa: BLE001, S112 - a dialect that cannot says so by raising, each in its own words
            continue
        calls += [built] if isinstance(built, Call) else built
    return frozenset(call.path.partition("?")[0] for call in calls)
