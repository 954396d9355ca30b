"""The mutants can still be made, and the simulator still finds them: a handful here, all of them in `make mutants`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants.campaign import Hunt, run
from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import Edit, Moved, Mutant
from tests.simulation.mutants.recorded import read_seeds

_HANDFUL = ("no_epoch_check", "claimed_group_not_counted", "spawn_not_registered", "lease_not_returned")


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_has_its_place(mutant: Mutant) -> None:
    """What a mutant changes stands in the source exactly once, and it changes something."""
    mutant.check()
    assert mutant.caught_by
    assert all(edit.original != edit.replacement for edit in mutant.edits)


def test_there_are_enough_of_them_and_each_has_its_seed() -> None:
    """Twenty kinds of bugs at least, each with the seed of a history that finds it."""
    assert len(MUTANTS) >= 20
    assert set(read_seeds()) == set(MUTANTS)


def test_a_handful_is_found_by_its_recorded_seed() -> None:  # P1 P3 P9
    """The recorded seed breaks a promise that the mutant is known to break."""
    seeds = read_seeds()
    hunts = [Hunt(MUTANTS[name], range(seeds[name], seeds[name] + 1)) for name in _HANDFUL]
    for verdict in run(hunts, 2, lambda _: None):
        assert verdict.killers, f"{verdict.hunt.mutant.name}: {verdict.odd} {verdict.error}"


def test_a_source_that_moved_on_is_said() -> None:
    """An edit whose original is not there, or twice, is refused by name."""
    with pytest.raises(Moved, match=r"rollout_svc\.gate has 0 times"):
        Edit("gate", "no such line", "").check()
    with pytest.raises(Moved, match=r"rollout_svc\.gate has \d+ times"):
        Edit("gate", "self", "").check()
    with pytest.raises(Moved, match=r"no module rollout_svc\.nowhere"):
        Edit("nowhere", "", "").check()


def test_nothing_is_written() -> None:
    """A mutant lives in one process: the source stays as it was, and so does its compiled form."""
    code = (
        "import sys; from tests.simulation.mutants.mutant import Edit, Mutant, infect\n"
        "edit = Edit('gate', 'return self._epochs[lane]', 'return 4711')\n"
        "infect(Mutant('m', 'b', (edit,), frozenset({'P3'})))\n"
        "from rollout_svc import gate\n"
        "assert gate.Gate().epoch('train') == 4711\n"
        "print(gate.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "return self._epochs[lane]" in Path(done.stdout.strip()).read_text(encoding="utf-8")
    plain = "from rollout_svc.gate import Gate; print(Gate().epoch('train'))"
    done = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
