"""Many hunts at once: each in a process of its own, and stopped as soon as it has found what it was started for.

Invariants:

- At most `jobs` processes run; none outlives the call that started it.
- A finding that the mutant is not known for is not a kill: it is kept apart, and shown.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Final

import orjson

from tests.simulation.mutants.mutant import Mutant, kind_of

__all__ = ["Hunt", "Verdict", "run"]

_HASH_SEED: Final = "0"  # no history depends on it; said so that nobody has to wonder
_ERROR_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class Hunt:
    """Some seeds to try a mutant on, until it was killed so often."""

    mutant: Mutant
    seeds: range
    kills: int = 1


@dataclass
class Verdict:
    """What a hunt came to.

    Attributes:
        killers: seeds whose history broke a promise that the mutant is known to break.
        by: which, and how often.
        odd: other findings, with a seed of each.
        error: what the process said, where it ended by itself before it was done.
    """

    hunt: Hunt
    tried: int = 0
    seconds: float = 0.0
    killers: list[int] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)
    odd: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def found_after(self) -> int | None:
        """How many seeds it took; None: it was not found."""
        return self.killers[0] - self.hunt.seeds.start + 1 if self.killers else None


def run(hunts: Iterable[Hunt], jobs: int, told: Callable[[Verdict], None]) -> list[Verdict]:
    """Carry out hunts; `told` is called as each ends."""
    verdicts = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_hunt, hunt) for hunt in hunts]):
            verdict = future.result()
            verdicts.append(verdict)
            told(verdict)
    return verdicts


def median_found_after(verdicts: Iterable[Verdict]) -> float:
    """The median over hunts; one that found nothing took more than all its seeds."""
    return statistics.median(
        len(verdict.hunt.seeds) + 1 if verdict.found_after is None else verdict.found_after for verdict in verdicts
    )


def _hunt(hunt: Hunt) -> Verdict:
    verdict, began = Verdict(hunt), time.perf_counter()
    seeds = f"{hunt.seeds.start}:{hunt.seeds.stop}"
    command = [sys.executable, "-m", "tests.simulation.mutants.hunt", hunt.mutant.name, seeds]
    environment = os.environ | {"PYTHONHASHSEED": _HASH_SEED}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            _count(verdict, orjson.loads(line))
            if len(verdict.killers) >= hunt.kills:
                process.kill()
                break
        else:
            if verdict.tried != len(hunt.seeds):
                verdict.error = process.stderr.read().decode(errors="replace")[-_ERROR_CHARS:]
    verdict.seconds = time.perf_counter() - began
    return verdict


def _count(verdict: Verdict, outcome: dict[str, object]) -> None:
    verdict.tried += 1
    seed, broken = outcome["seed"], outcome["broken"]
    if broken is None:
        return
    kind = kind_of(str(broken))
    if kind in verdict.hunt.mutant.caught_by:
        verdict.killers.append(int(str(seed)))
        verdict.by[kind] += 1
    else:
        verdict.odd.setdefault(kind, int(str(seed)))
