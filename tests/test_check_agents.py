"""The check of agent loops: each thing that a loop may do wrong is found, as itself, and where it is."""

import inspect
from pathlib import Path

import pytest

from rollout_svc.checking import leftovers, stepping
from rollout_svc.checking.agents import RULES
from rollout_svc.checking.check import check_agent
from tests.support import bad_agents

GOOD = ("Good", "GoodAborts", "GoodWorks")
BAD = {
    "NotAsync": "attributes",
    "OddPause": "attributes",
    "NoRun": "attributes",
    "Raises": "raises",
    "Exits": "raises",
    "ExitsBeside": "raises",
    "Fragile": "raises",
    "NeverEnds": "ends",
    "AsksForEver": "ends",
    "ReturnsText": "returns",
    "NoTurn": "turns",
    "NotOneTurn": "turns",
    "Tokenises": "ids",
    "Unsaid": "ids",
    "LastWord": "last_turn",
    "Keeps": "shared",
    "Uncancellable": "cancellation",
    "Renames": "cancellation",
    "Clings": "cancellation",
    "Swallows": "passes_on",
    "TriesAgain": "passes_on",
    "Wraps": "passes_on",
    "Impatient": "pauses",
    "LeavesTask": "left_running",
    "LeavesJob": "left_running",
    "LeavesThread": "left_running",
    "LeavesProcess": "left_running",
    "LeavesWhenCancelled": "left_running",
    "BadCleanUp": "clean_up",
    "Blocks": "holds_loop",
    "Spins": "holds_loop",
}
"""What is wrong with each, by the rule that says so."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the loop, or was left running, is told and ended sooner than in earnest."""
    monkeypatch.setattr(stepping, "_HELD_S", 0.25)
    monkeypatch.setattr(stepping, "_FREED_S", 0.3)
    monkeypatch.setattr(leftovers, "MOMENT_S", 0.15)


def lines_of(name: str) -> range:
    """The lines on which a class, or what it inherits from, is written."""
    lines: list[int] = []
    for kind in getattr(bad_agents, name).__mro__[:-1]:
        source, first = inspect.getsourcelines(kind)
        lines += [first, first + len(source)]
    return range(min(lines), max(lines))


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_loop_is_found_and_nothing_else(name: str) -> None:
    """P14, P15: one finding, under its own rule, at a line of that loop."""
    report = check_agent(f"tests.support.bad_agents:{name}")
    assert [finding.rule for finding in report.findings] == [BAD[name]]
    [finding] = report.findings
    file, _, line = finding.where.rpartition(":")
    assert Path(file).name == "bad_agents.py"
    assert int(line) in lines_of(name)
    assert finding.expected == RULES[finding.rule]
    assert finding.done
    assert finding.happened


@pytest.mark.parametrize("name", GOOD)
def test_a_loop_that_does_nothing_wrong_is_let_alone(name: str) -> None:
    """A loop may have tools, words of its own and clean-ups, and none of that is found fault with."""
    report = check_agent(f"tests.support.bad_agents:{name}")
    assert report.findings == ()
    assert report.tries > 15


def test_every_rule_is_broken_by_somebody() -> None:
    """No rule of the check stands there untried."""
    assert set(BAD.values()) == set(RULES)
