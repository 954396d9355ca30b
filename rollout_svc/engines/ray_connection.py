"""This process's one connection to a Ray cluster, for whoever first needs it.

Invariants:

- Blocks: called in a thread. A second `ray.init` beside the first is an error, so one caller connects at a time.
- A process that is connected stays connected to what it is connected to.
"""

from __future__ import annotations

import threading
from typing import Final

from rollout_svc.tensors.ray_store import check_reachable

__all__ = ["connect", "first_line"]

_CONNECTING: Final = threading.Lock()


def connect(address: str) -> None:
    """Connect to a cluster, unless this process is connected already.

    Args:
        address: of the cluster; `auto` finds the one that runs on this machine.

    Raises:
        OSError: nobody listens there, or there is no cluster.
    """
    import ray  # noqa: PLC0415 - takes a second to import: only for who uses it

    with _CONNECTING:
        if not ray.is_initialized():
            check_reachable(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)


def first_line(error: Exception) -> str:
    """What an error says; of one that was raised in another process the cause, without the traceback it quotes."""
    said = str(getattr(error, "cause", None) or error).strip()
    return said.splitlines()[0][:200] if said else ""
