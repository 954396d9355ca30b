"""What a caller may ask of a pause: words checked against what there is, before anything is stopped.

Invariants:

- Pure: it reads what workers are known to be capable of and changes nothing.
- What was read has a deadline in finite time, one lane or more, all of them in mode `keep`, and words that are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple, get_args

from rollout_svc.config import PauseConfig
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, MODES, Lane, Mode
from rollout_svc.workers.freezing import can_freeze
from rollout_svc.workers.worker import Cache, Worker

__all__ = ["Asked", "Terms", "read_terms"]

_CACHES: Final[tuple[Cache, ...]] = get_args(Cache)
_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message


class Asked(NamedTuple):
    """What a caller asks of a pause, unread; see `RolloutService.pause`."""

    mode: str | None = None
    deadline_s: float | None = None
    lanes: tuple[Lane, ...] = LANES
    if_ticket: int | None = None
    kv: str = "keep"
    offload: tuple[str, ...] = ()


class Terms(NamedTuple):
    """How to stop: what was asked for, or is configured, read."""

    mode: Mode
    cache: Cache
    deadline_s: float
    lanes: tuple[Lane, ...]


def read_terms(asked: Asked, config: PauseConfig, workers: Iterable[Worker]) -> Terms:
    """Read what is asked for; what is not said is as configured.

    Args:
        asked: by the caller.
        config: what holds where a caller does not say.
        workers: the engines that may have to freeze; none: whoever has them decides.

    Raises:
        BadRequest: a deadline that never comes or is over, no lane or one that is unknown, or what `_read_mode` says.
    """
    deadline = config.deadline_s if asked.deadline_s is None else asked.deadline_s
    if not (math.isfinite(deadline) and deadline > 0):
        raise BadRequest.at("deadline_s", "expected a finite number greater than 0")
    if not asked.lanes or not set(asked.lanes) <= set(LANES):
        raise BadRequest.at("lanes", f"expected some of {', '.join(LANES)}, not {list(asked.lanes)}")
    mode, cache = _read_mode(asked.mode or config.mode, asked.kv, asked.lanes, workers)
    return Terms(mode, cache, deadline, asked.lanes)


def _read_mode(mode: str, kv: str, lanes: Iterable[Lane], workers: Iterable[Worker]) -> tuple[Mode, Cache]:
    """Return the mode and what becomes of frozen caches.

    Raises:
        BadRequest: an unknown word, `keep` for some lanes only, or a freeze that no engine here can do.
    """
    how = next((known for known in MODES if known == mode), None)
    if how is None:
        raise BadRequest.at("mode", f"expected one of {', '.join(MODES)}, not {str(mode)[:_ECHO_CHARS]!r}")
    cache = next((known for known in _CACHES if known == kv), None)
    if cache is None:
        raise BadRequest.at("kv", f"expected one of {', '.join(_CACHES)}, not {str(kv)[:_ECHO_CHARS]!r}")
    if how == "keep":
        _refuse_freeze(cache, frozenset(lanes), list(workers))
    return how, cache


def _refuse_freeze(cache: Cache, lanes: frozenset[Lane], workers: list[Worker]) -> None:
    if missing := [lane for lane in LANES if lane not in lanes]:
        raise BadRequest.at("lanes", f"mode 'keep' freezes whole engines: it takes lane {', '.join(missing)} as well")
    known = [worker for worker in workers if worker.capabilities]
    if known and not any(can_freeze(worker, cache) for worker in known):
        raise BadRequest.at(
            "mode", f"no engine here can be frozen with kv {cache!r}: {', '.join(w.worker_id for w in known)}"
        )
