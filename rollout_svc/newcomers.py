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
from typing import Final

from rollout_svc.config import Config
from rollout_svc.engines import EngineProfile
from rollout_svc.preflight import ROUTING_FACTS, lacking, last_part, wants_experts
from rollout_svc.workers.worker import Worker

__all__ = ["Newcomers"]

_SPARE: Final = 64  # engines that were removed and are still known: they are looked for no more often than that

_Read = Callable[[EngineProfile], str | int | None]
_Kind = tuple[str | int | None, ...]
"""What engines are compared by: those of one kind differ in nothing."""


def _model(profile: EngineProfile) -> str | None:
    return profile.model


_MODEL: Final[tuple[str, _Read]] = ("model", _model)


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
        self._facts: list[tuple[str, _Read]] = [
            ("tokenizer", lambda profile: profile.tokenizer),
            ("vocabulary", lambda profile: profile.vocab_size),
        ]
        if wants_experts(config):
            self._facts += ROUTING_FACTS
        self._known: dict[str, _Kind] = {}
        self._alike: dict[_Kind, dict[str, EngineProfile]] = {}  # by kind who is of it, first come first

    def __repr__(self) -> str:
        return f"<Newcomers known={len(self._known)} kinds={len(self._alike)}>"

    def refuse(self, worker: Worker) -> str | None:
        """Say in a line why an engine is not let in, or None; one that is let in is remembered."""
        profile = worker.profile
        if profile is None:
            return None
        name = f"{worker.worker_id} at {worker.endpoint.url}"
        routed, withdrawn = worker.front is not None, worker.withdrawn
        lacks = lacking(self._config, worker.stream, profile, routed=routed, withdrawn=withdrawn)
        reasons = [f"{name} {words}" for _, words in lacks]
        reasons += self._differing(worker.worker_id, name, profile)
        if reasons:
            return "; ".join(reasons)
        self._remember(worker.worker_id, profile)
        return None

    def _differing(self, worker_id: str, name: str, profile: EngineProfile) -> list[str]:
        found = []
        witnesses = self._witnesses()
        for noun, read in [*self._facts, *([] if self._moved() else [_MODEL])]:
            value = read(profile)
            for known, other in witnesses:
                if noun == _MODEL[0] and (other.dialect, other.weight_label) != (profile.dialect, profile.weight_label):
                    continue
                before = read(other)
                if value is None or before is None or last_part(value) == last_part(before):
                    continue
                had = "it had" if known == worker_id else f"{known} has"
                found.append(f"{name} has {noun} {value!r}, {had} {before!r}")
                break
        return found

    # -- who is known ----------------------------------------------------------------------------------------

    def _witnesses(self) -> list[tuple[str, EngineProfile]]:
        """One of each kind that is in the fleet: a thousand engines that are alike say the same."""
        found = []
        for members in tuple(self._alike.values()):
            while members and (first := next(iter(members))) not in self._workers:
                self._forget(first)
            if members:
                found.append((first, members[first]))
        return found

    def _remember(self, worker_id: str, profile: EngineProfile) -> None:
        values = [read(profile) for _, read in (*self._facts, _MODEL)]
        kind: _Kind = (profile.dialect, profile.weight_label, *values)
        if self._known.get(worker_id) != kind:
            self._forget(worker_id)
            self._known[worker_id] = kind
        self._alike.setdefault(kind, {})[worker_id] = profile
        if len(self._known) > _SPARE + 2 * len(self._workers):
            for gone in self._known.keys() - self._workers.keys():
                self._forget(gone)

    def _forget(self, worker_id: str) -> None:
        kind = self._known.pop(worker_id, None)
        if kind is None:
            return
        self._alike[kind].pop(worker_id)
        if not self._alike[kind]:
            del self._alike[kind]
