"""Who asks for new weights, and for the word of every engine that it has some.

Invariants:

- One update at a time; a caller that leaves ends its own wait, and the update goes on.
- What can be known to be wrong is refused before anything is stopped: a version that is not newer than the fleet's,
  files that are not whole, or of other tensors than the weights before them, a way that engines in traffic cannot take.
- Weights that engines gave up are back before any are loaded; their caches, when the stage goes on.
- An update that made the pause around it ends that pause, unless somebody else asked for one meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from rollout_svc.config import Config
from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.gate import LANES
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.offloading import Offloading
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.checkpoint import capped, problems_of
from rollout_svc.weights.fleet import Fleet, Source
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.reference import Checked, Reference
from rollout_svc.weights.request import refuse_old, refuse_undrained
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.pool import WorkerPool

__all__ = ["WeightCalls"]

_HEADERS_S: Final = 30.0  # seconds for a look at the headers of files; a stage that runs goes on meanwhile


class WeightCalls:
    """The calls that move weights; see the module's invariants."""

    def __init__(
        self,
        *,
        tasks: TaskOwner,
        pauses: PauseController,
        offloading: Offloading,
        updater: WeightUpdater,
        fleet: Fleet,
        pool: WorkerPool,
        pause: Callable[..., Awaitable[object]],
        check: Callable[[], None],
        runs: Callable[[], bool],
        config: Config,
    ) -> None:
        """Make the calls.

        Args:
            tasks: who carries an update.
            pauses: who knows what is drained.
            offloading: who wakes engines.
            updater: who moves the weights.
            fleet: which weights there are.
            pool: the engines.
            pause: the service's own, with its arguments unread.
            check: raises where the service does not run, or has failed.
            runs: whether it is neither starting nor stopping.
            config: the settings.
        """
        self._tasks = tasks
        self._pauses = pauses
        self._offloading = offloading
        self._updater = updater
        self._fleet = fleet
        self._pool = pool
        self._pause = pause
        self._check = check
        self._runs = runs
        self._check_files = config.weights.check_files
        self._update_timeout_s = config.weights.update_timeout_s or config.request_timeout_s
        self._reference = Reference()
        self._threads = CallThreads("weights")
        self._updating: asyncio.Task[dict[str, Any]] | None = None

    @property
    def updating(self) -> asyncio.Task[dict[str, Any]] | None:
        """The update under way."""
        return self._updating

    async def update(
        self, version: int, source: Source, pause: Mapping[str, Any] | None, *, force: bool
    ) -> dict[str, Any]:
        """Bring every worker to `version`; while running, inside of `pause`.

        Args:
            version: trainer steps whose weights these are.
            source: where they come from.
            pause: arguments of the pause around it; None: the stage is paused.
            force: also where the fleet has that version already, or a later one.

        Raises:
            Conflict: another is under way, the version is no newer, or the stage runs; nothing was stopped.
            BadRequest: the files cannot be what is meant; nothing was stopped, and all that is wrong is listed.
            NotNow: it failed, see `weights.on_failure`; or the service stopped: engines keep what they had, but for
                those that were told to swap or to load in that moment.
        """
        if self._updating is not None:
            raise Conflict("another weight update is under way", type="updating")
        refuse_old(version, self._fleet.version, force=force)
        work = self._update(version, source, pause)
        updating = self._updating = self._tasks.spawn(f"weights:{version}", work, handled=True)
        try:
            return await asyncio.shield(updating)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if updating.cancelled() and not (caller and caller.cancelling()):  # it is not the caller who was cancelled
                raise NotNow("stopping", f"the service stopped during the update to version {version}") from None
            raise
        finally:
            if self._updating.done():
                self._updating = None
            else:
                self._updating.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._updating = None
        if not task.cancelled():
            task.exception()

    async def _update(self, version: int, source: Source, pause: Mapping[str, Any] | None) -> dict[str, Any]:
        pauses = self._pauses
        if pauses.state == "running":
            _refuse_unpaused(pause)
        checked = await self._refuse_unsound(source)
        self._check()
        self._updater.refuse_unable(source)
        was_running = pauses.state == "running"
        asked = pauses.asked + 1
        if not source.moves:
            self._refuse_weightless("nobody can have moved weights there")
        if was_running:
            _refuse_unpaused(pause)
        else:
            refuse_undrained(pauses.drained)
        phases = Phases(asyncio.get_running_loop().time)
        with self._updater.telling(version, source, phases):
            if was_running:
                during = _refuse_unpaused(pause)
                with phases.during("pause"):
                    await self._pause(**during)
                self._check()
            refuse_undrained(pauses.drained)
            await self._offloading.wake(("weights",))  # so that there is something to load into
            self._refuse_weightless("another pause put them to sleep")
            record = await self._updater.update(version, source, phases, since=pauses.closed_at)
            self._reference.keep(checked)
            # Whoever else paused since the call began got this pause's ticket, and is owed a stage that stays paused.
            if was_running and self._runs() and pauses.asked == asked and not pauses.climbing:
                with phases.during("resume"):
                    await self._offloading.wake()
                    if self._runs() and pauses.asked == asked and not pauses.climbing:
                        pauses.resume()
        return record

    def _refuse_weightless(self, why: str) -> None:
        if asleep := self._offloading.weightless:
            words = f"{', '.join(asleep)} gave their weights up, and sleep: {why}"
            raise Conflict(words, type="asleep", detail={"workers": asleep})

    async def _refuse_unsound(self, source: Source) -> Checked | None:
        """Look at the files engines are to load, and say what is in them.

        Raises:
            BadRequest: with all that is wrong with them.
        """
        path, finite = source.path, source.check_finite
        if path is None or not (finite or self._check_files):
            return None
        served = [worker.profile.model for worker in self._pool.workers.values() if worker.profile is not None]
        given_up = threading.Event()
        checked: Checked | None = None

        def look() -> Checked:
            problems = problems_of(path, finite=finite, stopped=given_up.is_set)
            if problems or not self._check_files:
                return Checked(path, None, problems)
            found = self._reference.check(path, [model for model in served if model is not None])
            return found._replace(problems=capped(found.problems) if source.check_names else [])

        try:
            checked = await self._threads.call(look, self._update_timeout_s if finite else _HEADERS_S)
            problems = checked.problems
        except (TimeoutError, NoThread):
            # A disk that is slow, or hangs here, says nothing against the files.
            problems = ["its values could not be checked in time"] if finite else []
        finally:
            given_up.set()
        if problems:
            message = f"source.path: {'; '.join(problems)}"
            raise BadRequest(message, detail=[{"path": "source.path", "message": words} for words in problems])
        return checked

    async def assert_version(self, version: int) -> None:
        """Raise Conflict unless every worker in traffic reports `version`, and there is one."""
        active = self._pool.active
        labels = await asyncio.gather(*(self._fleet.ask(worker) for worker in active))
        reported = {worker.worker_id: label for worker, label in zip(active, labels, strict=True)}
        if not active or any(found != version for found in reported.values()):
            raise Conflict(
                f"not every worker in traffic reports weight version {version}",
                type="weight_version",
                detail={"weight_version": version, "workers": reported},
            )


def _refuse_unpaused(pause: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The pause around an update of a stage that runs; raises Conflict where there is none, or it drains too little."""
    if pause is None:
        raise Conflict("the stage is running: pause it first, or pass `pause`", type="not_paused")
    refuse_undrained(pause.get("lanes", LANES))
    return pause
