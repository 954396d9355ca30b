"""What a caller may ask of a pause: words checked against what there is, before anything is stopped.

Invariant: pure: it reads what workers are known to be capable of and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, MODES, Lane, Mode
from rollout_svc.workers.freezing import can_freeze
from rollout_svc.workers.worker import Cache, Worker

__all__ = ["read_mode"]

_CACHES: Final[tuple[Cache, ...]] = get_args(Cache)
_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message


def read_mode(mode: str, kv: str, lanes: Iterable[Lane], workers: Iterable[Worker]) -> tuple[Mode, Cache]:
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
