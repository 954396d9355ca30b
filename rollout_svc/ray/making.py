"""Making the service of an actor, again and again while what keeps it from being made may pass.

Invariants:

- What is in use, does not answer, or fails in the machine is tried again, at growing distances, until the service is
  made or nobody wants it. Settings that cannot work, and a bug, are not: they are what every call says from then on.
- Whoever asks meanwhile is told what was wrong, and when it is tried again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from rollout_svc.errors import InUse, NotNow, Problem, RolloutError
from rollout_svc.ray.thread import Failure
from rollout_svc.startup import StartFailed

__all__ = ["CAP_S", "Making", "persist"]

_FIRST_S: Final = 1.0  # seconds between the first two attempts; each time twice as long
CAP_S: Final = 30.0
"""The longest time between two attempts: a lock that a lost machine holds is gone in about as long."""
_MAY_PASS: Final = (InUse, StartFailed, NotNow, OSError)
_log = structlog.get_logger("actor")


class Stoppable(Protocol):
    """What is made."""

    def stop(self) -> Any:
        """End it."""


S = TypeVar("S", bound=Stoppable)


class Making(Generic[S]):
    """One service, made or not; see the module's invariants."""

    def __init__(self, make: Callable[[], S]) -> None:
        """Try once, here; and then, where that may help, in a thread."""
        self._make = make
        self._made: S | None = None
        self._failure = Failure()
        self._again_at: float | None = None
        self._wanted = True
        self._lock = threading.Lock()
        try:
            self._made = make()
        except Exception as error:  # noqa: BLE001 - told to whoever calls, whatever it is
            if self._note(error, _FIRST_S) is not None:
                threading.Thread(target=self._go_on, name="making", daemon=True).start()

    @property
    def made(self) -> S | None:
        """The service; None: it is not there."""
        return self._made

    def get(self) -> S:
        """The service; raises what keeps it from being made."""
        if self._made is None:
            raise self._error()
        return self._made

    def stop(self) -> S | None:
        """Try no more; returns what was made, for the caller to end."""
        with self._lock:
            self._wanted = False
            return self._made

    def _error(self) -> Exception:
        error, at = self._failure.again(), self._again_at
        return error if at is None else _with_when(error, max(0.0, at - time.monotonic()))

    def _note(self, error: Exception, delay_s: float) -> float | None:
        """Remember a failure; returns the seconds until the next attempt, None where there is none."""
        again = isinstance(error, _MAY_PASS)
        self._failure, self._again_at = Failure(error), time.monotonic() + delay_s if again else None
        _log.error("service.not_made", error=str(error), again_in_s=delay_s if again else None)
        return delay_s if again else None

    def _go_on(self) -> None:
        asyncio.run(persist(self._attempt, self._note))

    async def _attempt(self) -> bool:
        """Make it, in this thread, which has nothing else to do; returns whether that is the end of it."""
        if self._wanted:
            made = self._make()
            if not self._take(made):
                made.stop()  # whoever ended the actor did not wait for this
        return True

    def _take(self, made: S) -> bool:
        """Keep what was made, if it is still wanted."""
        with self._lock:
            if self._wanted:
                self._made = made
            return self._wanted


async def persist(attempt: Callable[[], Awaitable[bool]], failed: Callable[[Exception, float], float | None]) -> None:
    """Attempt something that has failed once, until it works, or can never work.

    Args:
        attempt: does it; returns whether it is done.
        failed: is told of an error and of the seconds until the next attempt; returns them, or None to give up.
    """
    delay_s: float | None = _FIRST_S
    while delay_s is not None:
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, CAP_S)
        try:
            if await attempt():
                return
        except Exception as error:  # noqa: BLE001 - whoever asks is told
            delay_s = failed(error, delay_s)


def _with_when(error: Exception, again_in_s: float) -> Exception:
    """Make the same error with the time of the next attempt, in words and as `again_in_s`."""
    when = f"it is tried again in {again_in_s:.1f} s"
    told: RolloutError
    if isinstance(error, InUse):
        told = InUse(Problem(problem.path, f"{problem.message}; {when}") for problem in error.problems)
    elif isinstance(error, StartFailed):
        told = StartFailed(f"{error}; {when}")
    else:
        told = NotNow("starting", f"{type(error).__name__}: {error}; {when}", retry_after_s=again_in_s)
    told.again_in_s, told.__cause__ = again_in_s, error
    return told
