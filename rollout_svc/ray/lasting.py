"""How long a stop may last, of a service and of one with shards: by the deadlines that are configured.

Invariant: pure; a sum of what its steps may take, each of which has a bound of its own.
"""

from __future__ import annotations

from typing import Final

from rollout_svc.config import Config
from rollout_svc.sharding.book import CLOSE_S
from rollout_svc.shutdown import STOP_MARGIN_S

__all__ = ["stop_s"]

_HTTP_S: Final = 5.0  # seconds for the control API to let its callers go, and for the loop to end
_RAY_S: Final = 5.0  # seconds for a shard's actor to hear of it, and to answer


def stop_s(config: Config) -> float:
    """Return within how many seconds a service has stopped, with all of its shards.

    One pauses, wakes the engines that it had put to sleep, and ends its tasks, then its processes. Of several the
    coordinator pauses all and ends its own; then each of them stops, and the book is closed.
    """
    deadline_s = config.pause.deadline_s
    one_s = 2 * deadline_s + 2 * STOP_MARGIN_S + _HTTP_S
    if config.producer.shards == 1:
        return one_s
    return deadline_s + STOP_MARGIN_S + _HTTP_S + one_s + _RAY_S + CLOSE_S
