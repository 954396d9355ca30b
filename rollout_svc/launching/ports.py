"""Which port an engine gets that was given none.

Invariant: pure: whether a port is free is asked of whoever can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from random import Random
from typing import Final

from rollout_svc.launching.launch import LaunchFailed

__all__ = ["AUTO_PORTS", "choose_port"]

AUTO_PORTS: Final = range(20_000, 30_000)
"""Below what the system gives to outgoing connections (from 32768 on Linux), of which one could take the port while its
engine still loads, and apart from the engines' own defaults (30000, 8000, 23333 are somebody's by hand)."""
_DEFAULTS: Final = frozenset({23_333})  # LMDeploy's own
_TRIES: Final = 200


def choose_port(
    before: int | None,
    taken: Container[int | None],
    is_free: Callable[[int], bool],
    rng: Random,
    ports: Sequence[int] = AUTO_PORTS,
) -> int:
    """Choose a port: the one it had where that is still free, else any.

    Args:
        before: the port it had.
        taken: ports that are others', whether or not they listen there now.
        is_free: whether nobody listens there.
        rng: chooses.
        ports: to choose from.

    Raises:
        LaunchFailed: none was found to be free.
    """
    if before is not None and is_free(before):
        return before
    for _ in range(_TRIES):
        port = rng.choice(ports)
        if port not in _DEFAULTS and port not in taken and is_free(port):
            return port
    raise LaunchFailed(f"no free port among {_TRIES} tried in {min(ports)}-{max(ports)}")
