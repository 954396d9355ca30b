"""What one life told its engines to do, as the wire saw it: aborts and freezes, and what follows from them.

Invariants checked here:

- P9: what survived an abort is aborted again, for as long as the climb lasts.
- P9: a count that is reported was made after the last join.
- P10: the time limit of a request does not run while its engine is known to be frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rollout_svc.workers.worker import EngineCall, Worker

if TYPE_CHECKING:
    from rollout_svc.pause.climb import Climb
    from tests.simulation.life import Life

__all__ = ["WireLog"]

_SERVED: Final = frozenset({"/abort_request", "/pause_generation", "/continue_generation"})  # one after the other
_GRAIN_S: Final = 8 / 1024  # a few ticks of the loop, between a moment and whoever acts on it


class WireLog:
    """One life's."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world
        self._serving: dict[str, int] = {}  # url: aborts, freezes and thaws under way
        self._served_at: dict[str, float] = {}  # url: when the last one ended
        self._counted_at: dict[str, float] = {}  # url: when it last told its count
        self._held: dict[str, list[tuple[float, float | None]]] = {}  # url: from a confirmed freeze to its thaw

    def begins(self, url: str, path: str) -> None:
        """A control call is about to leave."""
        if path in _SERVED:
            self._serving[url] = self._serving.get(url, 0) + 1
        if path == "/continue_generation":
            self._let_go(url)

    def ends(self, url: str, path: str, *, confirmed: bool) -> None:
        """It is over, however it ended."""
        if path in _SERVED:
            self._serving[url] -= 1
            self._served_at[url] = self._world.now
        if path.startswith("/v1/loads") and confirmed:
            self._counted_at[url] = self._world.now
        if path == "/pause_generation" and confirmed:
            self._let_go(url)
            self._held.setdefault(url, []).append((self._world.now, None))

    def _let_go(self, url: str) -> None:
        held = self._held.get(url)
        if held and held[-1][1] is None:
            held[-1] = (held[-1][0], self._world.now)

    def check_survivors(self, climb: Climb) -> None:
        """At the rung where calls are cancelled: each was aborted lately, or its worker is being told something now."""
        interval_s = self._life.config.pause.abort_interval_s + 0.05
        for worker in self._life.parts.pool.workers.values():
            url, now = worker.endpoint.url, self._world.now
            since = max(climb.anchor, self._served_at.get(url, climb.anchor))
            calls = [call for call in climb.calls(worker) if call.answer is None]  # what came needs no abort to come
            if calls and not self._serving.get(url) and now - since > interval_s + _GRAIN_S:
                self._world.breaks("P9", f"{worker} was last aborted {now - since:.3f} s ago, and still runs {calls}")

    def check_counts(self, climb: Climb, grown_at: float) -> None:
        """At the report: whoever has a residual told it since the climb last grew."""
        for worker_id, tally in climb.tallies.items():
            worker = self._life.parts.pool.workers.get(worker_id)
            if worker is None or tally.residual is None:
                continue
            quarantined = worker.quarantine is not None and worker.quarantine.kind == "residual"
            if quarantined or worker.active_since >= grown_at:
                continue  # its supervisor asked, and said so to the climb
            counted_at = self._counted_at.get(worker.endpoint.url, 0.0)
            how = f"{worker} is said to run {tally.residual}, as of {grown_at - counted_at:.3f} s before it was stopped"
            self._world.require(counted_at >= grown_at, "P9", how)

    def check_timeout(self, worker: Worker, call: EngineCall) -> None:
        """A call was ended for its time limit: it has to have had that time."""
        now = self._world.now
        held_s = sum(
            max(0.0, (now if end is None else end) - max(begin, call.since))
            for begin, end in self._held.get(worker.endpoint.url, ())
        )
        had_s, limit_s = now - call.since - held_s, self._life.config.request_timeout_s
        self._world.require(
            had_s >= limit_s - _GRAIN_S, "P10", f"{call} had {had_s:.3f} s of {limit_s:g}, it was frozen {held_s:.3f} s"
        )
