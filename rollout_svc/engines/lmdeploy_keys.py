"""Routed experts that LMDeploy's Ray executor keeps, and sends only the key of.

They lie with the detached actor `shared_store` of namespace `lmdeploy`: `get(key)` hands out what a key names, once,
and what nobody fetches stays there for good. So every key that reaches us is fetched, also where its answer came too
late or is of no use; what the engine kept of an answer that never reached us nobody can name.

Invariants:

- Off the loop, in threads that nobody joins: a cluster that does not answer holds up neither the loop nor the end of
  the process.
- Bounded; whatever keeps a key from its array is a failure of its sample, named.
- Connected when the first key comes, to what this process is connected to already, if anything.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from rollout_svc.errors import SampleFailure
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.tensors.ray_connection import connect, first_line

__all__ = ["FETCH_S", "ExpertKeys"]

FETCH_S: Final = 60.0
"""Seconds for one key: to connect takes seconds, once; a GiB from another node a few."""
_ACTOR: Final = "shared_store"
_NAMESPACE: Final = "lmdeploy"


class ExpertKeys:
    """Fetches what keys name; used in one event loop.

    Args:
        address: of the Ray cluster; `auto` finds the one that runs on this machine.
        timeout_s: seconds for one key.
    """

    __slots__ = ("_address", "_threads", "_timeout_s")

    def __init__(self, address: str = "auto", timeout_s: float = FETCH_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._threads = CallThreads("experts")

    def __repr__(self) -> str:
        return f"<ExpertKeys {self._address} {self._threads!r}>"

    async def fetch(self, key: str) -> np.ndarray[Any, Any]:
        """Fetch what a key names; a second time there is nothing.

        Whoever is cancelled here leaves the fetch to itself: what comes then goes to nobody, and is kept by nobody.

        Args:
            key: from an answer, as the dialect let it through.

        Returns:
            `(rows, layers, top_k)` as the engine put it there; it may lie in Ray's store for as long as it is held.

        Raises:
            SampleFailure: `experts_missing`: it is not there, or could not be had in time.
        """
        try:
            found = await self._threads.call(partial(self._get, key), self._timeout_s)
        except TimeoutError as error:
            raise _missing(key, f"not within {self._timeout_s:g} s") from error
        except NoThread as error:
            raise _missing(key, str(error)) from error
        except Exception as error:  # Ray's own errors, and whatever the engine's actor raises
            raise _missing(key, f"{type(error).__name__}: {first_line(error)}") from error
        array: np.ndarray[Any, Any] = found
        return array

    def _get(self, key: str) -> Any:
        """Ask the actor; in a thread."""
        import ray  # noqa: PLC0415 - takes a second to import: only where a key came

        connect(self._address)
        actor = ray.get_actor(_ACTOR, namespace=_NAMESPACE)
        return np.asarray(ray.get(actor.get.remote(key), timeout=self._timeout_s))


def _missing(key: str, why: str) -> SampleFailure:
    return SampleFailure("experts_missing", f"routed experts: no {key:.16}… at LMDeploy's {_ACTOR}: {why}")
