"""Whether an engine that is added later, or comes back, is one that the start would have let in.

Invariants:

- No I/O: it is asked in the step in which an engine said what it is, before its weights are looked at.
- The first that fits says what the others have to be, and one that comes back has to be what it was. What an engine
  does not say is never held against it.
- Models are compared only while no weights have been moved: afterwards engines name what they loaded.
- Whoever was removed is forgotten: a fleet may be replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_svc.config import Config
from rollout_svc.engines import EngineProfile
from rollout_svc.preflight import ROUTING_FACTS, lacking, last_part, wants_experts
from rollout_svc.workers.worker import Worker

__all__ = ["Newcomers"]


class Newcomers:
    """Remembers what the engines of the fleet are.

    Args:
        config: the settings.
        workers: the fleet, by worker id, as it is at any time.
        moved: whether weights were moved since the start.
    """

    def __init__(self, config: Config, workers: Mapping[str, Worker], moved: Callable[[], bool]) -> None:
        self._config = config
        self._workers = workers
        self._moved = moved
        self._known: dict[str, EngineProfile] = {}

    def __repr__(self) -> str:
        return f"<Newcomers {sorted(self._known)}>"

    def refuse(self, worker: Worker) -> str | None:
        """Say in a line why an engine is not let in, or None; one that is let in is remembered."""
        profile = worker.profile
        if profile is None:
            return None
        self._known = {known: what for known, what in self._known.items() if known in self._workers}
        name = f"{worker.worker_id} at {worker.endpoint.url}"
        routed, withdrawn = worker.front is not None, worker.withdrawn
        lacks = lacking(self._config, worker.stream, profile, routed=routed, withdrawn=withdrawn)
        reasons = [f"{name} {words}" for _, words in lacks]
        reasons += self._differing(worker.worker_id, name, profile)
        if reasons:
            return "; ".join(reasons)
        self._known[worker.worker_id] = profile
        return None

    def _differing(self, worker_id: str, name: str, profile: EngineProfile) -> list[str]:
        what: list[tuple[str, Callable[[EngineProfile], str | int | None]]] = [
            ("tokenizer", lambda profile: profile.tokenizer),
            ("vocabulary", lambda profile: profile.vocab_size),
        ]
        if wants_experts(self._config):
            what += ROUTING_FACTS
        if not self._moved():
            what.append(("model", lambda profile: profile.model))
        found = []
        for noun, read in what:
            value = read(profile)
            for known, other in self._known.items():
                if noun == "model" and (other.dialect, other.weight_label) != (profile.dialect, profile.weight_label):
                    continue
                before = read(other)
                if value is None or before is None or last_part(value) == last_part(before):
                    continue
                had = "it had" if known == worker_id else f"{known} has"
                found.append(f"{name} has {noun} {value!r}, {had} {before!r}")
                break
        return found
