"""The one retry helper: a call that failed by its worker's doing is made again.

Invariants:

- Only WorkerFailure is retried, and never NoWorker; a cancellation, an interruption and a sample's own failure pass.
- Tries are capped; the sleep between two is jittered and doubling, or what the engine asked for, and the caller's own
  `sleep` may end it by raising.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, TypeVar

import tenacity

from rollout_svc.errors import NoWorker, WorkerFailure

__all__ = ["MAX_TRIES", "retry"]

MAX_TRIES: Final = 4  # calls, the first included, before the sample goes back to the buffer
_BACKOFF_S: Final = 0.1  # seconds; the first retry's sleep is twice this, doubling, jittered
_BACKOFF_CAP_S: Final = 5.0
_RETRY_AFTER_CAP_S: Final = 30.0  # an engine's Retry-After is honoured up to here

T = TypeVar("T")


async def retry(
    first: WorkerFailure,
    again: Callable[[WorkerFailure], Awaitable[T]],
    *,
    sleep: Callable[[float], Awaitable[None]],
    rng: Random,
    announce: Callable[[WorkerFailure, int, float], None],
) -> T:
    """Go on after a first failure, which the caller has met already: the happy path never comes here.

    Args:
        first: how the first call failed.
        again: makes another call; given the last failure.
        sleep: waits between two calls, seconds.
        rng: jitter.
        announce: told of each retry: the failure, calls made so far, seconds until the next.

    Raises:
        WorkerFailure: the last one, once the tries are used up.
    """
    failures = [first]

    def wait(state: tenacity.RetryCallState) -> float:
        asked = failures[-1].retry_after_s
        if asked is not None:
            return min(asked, _RETRY_AFTER_CAP_S)
        backoff: float = min(_BACKOFF_CAP_S, _BACKOFF_S * 2**state.attempt_number)
        return backoff * rng.uniform(0.5, 1.0)

    def before_sleep(state: tenacity.RetryCallState) -> None:
        seconds = state.next_action.sleep if state.next_action else 0.0
        announce(failures[-1], state.attempt_number, float(seconds))

    async def attempt() -> T:
        if attempts.statistics["attempt_number"] == 1:
            raise first  # met already; raised again so that tenacity's count and waits are the whole story
        try:
            return await again(failures[-1])
        except WorkerFailure as failure:
            failures.append(failure)
            raise

    attempts = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(MAX_TRIES),
        wait=wait,
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, WorkerFailure) and not isinstance(e, NoWorker)),
        sleep=sleep,
        before_sleep=before_sleep,
        reraise=True,
    )
    return await attempts(attempt)
