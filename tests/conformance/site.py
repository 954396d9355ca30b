"""An engine as the promises of stopping meet it: something that holds requests, and can be made to misbehave.

- A site is faked or real; what a promise asks of it can be had from both. What only a fake can do says so (`lossy`).
- Whatever is done to it is undone by `heal`, so that a real one may serve many tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from rollout_svc.engines import Call, Dialect

__all__ = ["SLOTS", "Site", "control_paths"]

SLOTS: Final = 4
"""Requests a site decodes together; the rest waits in its queue."""


class Site(Protocol):
    """One engine under test.

    Attributes:
        name: of the test's case.
        dialect: to ask it with, and its name for the configuration.
        capabilities: what registration is to find.
        sampling: the task's settings, under which a request uses its whole `max_tokens` unless it is stopped.
        lossy: whether aborts can be lost on purpose.
    """

    name: str
    dialect: Dialect
    capabilities: frozenset[str]
    sampling: Mapping[str, Any]
    lossy: bool

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
        """Answer aborts well and do nothing; for a site that is `lossy`."""

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
