"""Whose memory a pause may give up, and what the report says of it: pure.

Invariants:

- What cannot be done is refused by name before anything is stopped: for an engine in traffic, a mode, a lane, a tag.
- Only an engine in traffic with nothing inside is put to sleep: not a frozen one, and none that a pause left running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from rollout_svc.engines.memory import TAGS, Tag
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, Lane, Mode
from rollout_svc.workers.sleeping import can_offload
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Offloaded", "in_the_way", "read_offload"]

_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message
_SWITCHES: Final = {
    "sglang": "--enable-memory-saver",
    "vllm": "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1",
    "lmdeploy": "a version with /sleep and /is_sleeping",
}


@dataclass(slots=True)
class Offloaded:
    """What came of it.

    Attributes:
        workers: the tags each worker's engine has given up.
        kept: why a worker's did not give up what was asked for.
    """

    workers: dict[str, list[Tag]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def read_offload(tags: Iterable[str], mode: Mode, lanes: Iterable[Lane], workers: Iterable[Worker]) -> frozenset[Tag]:
    """Read what memory is to be given up; nothing where nothing is asked for.

    Raises:
        BadRequest: an unknown tag, a mode that leaves requests in the engines, some lanes only, or an engine in traffic
            that cannot.
    """
    given = list(tags)
    wanted = frozenset(tag for tag in TAGS if tag in given)
    if unknown := [tag for tag in given if tag not in TAGS]:
        told = f"expected some of {', '.join(TAGS)}, not {str(unknown[0])[:_ECHO_CHARS]!r}"
        raise BadRequest.at("offload", told)
    if not wanted:
        return wanted
    if mode == "keep":
        raise BadRequest.at("offload", "mode 'keep' leaves requests in the engines, and their memory with them")
    if missing := [lane for lane in LANES if lane not in frozenset(lanes)]:
        raise BadRequest.at("lanes", f"engines sleep as a whole: offload takes lane {', '.join(missing)} as well")
    unable = [_told(w) for w in workers if w.state is WorkerState.ACTIVE and not can_offload(w)]
    if unable:
        raise BadRequest.at("offload", "; ".join(unable))
    return wanted


def in_the_way(worker: Worker) -> str | None:
    """Why it cannot be put to sleep now; None where nothing is in the way."""
    if worker.state is not WorkerState.ACTIVE:
        return f"it is {worker.state}: {worker.reason}"
    if worker.loading:
        return "weights are on their way to it"
    if worker.freeze is not None:
        return "it is frozen, or may be"
    if worker.calls:
        return f"{len(worker.calls)} requests are open there"
    if worker.residual:
        return f"its engine still counts {worker.residual} requests"
    if worker.unsure:
        return "its connection broke: it may be another process by now"
    return None if can_offload(worker) else _told(worker)


def _told(worker: Worker) -> str:
    name = f"{worker.worker_id} at {worker.endpoint.url}"
    if not worker.exclusive:
        return f"{name} is not exclusive: others may send requests to it while it sleeps"
    return f"{name} ({worker.dialect.name}) cannot give up memory: it needs {_SWITCHES.get(worker.dialect.name, '?')}"
