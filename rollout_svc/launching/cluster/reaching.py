"""Whether a configuration's cluster is there: found out before anything is started.

Invariant: takes seconds at most, also where somebody listens who is no Ray.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from rollout_svc.config import Config
from rollout_svc.errors import Problem
from rollout_svc.filtering.threads import CallThreads
from rollout_svc.tensors.ray_connection import connect, first_line

__all__ = ["cluster_problems"]

_REACH_S: Final = 20.0  # seconds to import Ray and to connect: one that is there takes two or three


async def cluster_problems(config: Config) -> list[Problem]:
    """Say why engines cannot be launched on the cluster; nothing where they can, or where there is no cluster."""
    if config.cluster is None:
        return []
    if importlib.util.find_spec("ray") is None:
        return [Problem("cluster", "needs Ray, which is not installed here: pip install ray")]
    address = config.cluster.address
    try:
        await CallThreads("cluster").call(lambda: connect(address), _REACH_S)
    except TimeoutError:
        return [Problem("cluster.address", f"{address!r} did not answer as a Ray cluster within {_REACH_S:g} s")]
    except Exception as error:  # noqa: BLE001 - whatever Ray says of a cluster that is not there
        why = f"{type(error).__name__}: {first_line(error)}"
        return [Problem("cluster.address", f"no Ray cluster at {address!r}: {why}")]
    return []
