"""Many histories: a range of seeds, over several processes, summed up.

Invariant: what a seed does depends on the seed alone, never on the process, its hash seed or the seeds before it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, repeat
from multiprocessing import get_context
from typing import Final, Protocol

from tests.simulation.history import Outcome, run_history

__all__ = ["RunHistory", "Summary", "digests_elsewhere", "outcomes", "seeds_of"]

_CHUNK: Final = 25  # seeds a process takes at a time
_COLLECT: Final = 20  # histories between two collections: each leaves cycles behind


class RunHistory(Protocol):
    """Runs one seed; see `run_history`."""

    def __call__(self, seed: int, *, adversarial: bool = False, digest: bool = False) -> Outcome: ...


@dataclass
class Summary:
    """What a range came to."""

    histories: int = 0
    turns: int = 0
    admitted: int = 0
    pauses: int = 0
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count a history."""
        self.histories += 1
        self.turns += outcome.turns
        self.admitted += outcome.admitted
        self.pauses += outcome.pauses
        self.met += outcome.met
        if outcome.broken is not None:
            self.broken[outcome.seed] = outcome.broken


def seeds_of(text: str) -> range:
    """Read `123:456`, half open, or one seed."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def outcomes(
    seeds: Iterable[int], *, adversarial: bool, digest: bool, jobs: int, run: RunHistory = run_history
) -> Iterator[Outcome]:
    """Run seeds, in order where there is one job; `run`, a function of a module, runs one."""
    if jobs == 1:
        yield from _run(list(seeds), adversarial, digest, run)
        return
    rest = iter(seeds)
    chunks = list(iter(lambda: list(islice(rest, _CHUNK)), []))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in pool.map(_listed, chunks, repeat(adversarial), repeat(digest), repeat(run)):
            yield from done


def _listed(seeds: list[int], adversarial: bool, digest: bool, run: RunHistory) -> list[Outcome]:
    return list(_run(seeds, adversarial, digest, run))


def _run(seeds: list[int], adversarial: bool, digest: bool, run: RunHistory) -> Iterator[Outcome]:
    warnings.filterwarnings("ignore", message=r"coroutine .* was never awaited")  # killed before their first step
    gc.collect()
    gc.freeze()
    for number, seed in enumerate(seeds):
        outcome = run(seed, adversarial=adversarial, digest=digest)
        if number % _COLLECT == _COLLECT - 1:
            gc.collect()
        yield outcome


def digests_elsewhere(seeds: str, hash_seed: int, *, adversarial: bool) -> subprocess.Popen[str]:
    """Start a process of its own, with a hash seed of its own, that prints the digests of these seeds."""
    command = [sys.executable, "-m", "tests.simulation", seeds, "--digest"]
    if adversarial:
        command.append("--adversarial")
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
