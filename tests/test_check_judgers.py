"""The check of judgers: each thing that a judger may do wrong is found, as itself, and where it is."""

from pathlib import Path

import pytest

from rollout_svc.checking import leftovers, stepping
from rollout_svc.checking.check import check_judger
from rollout_svc.checking.judgers import RULES

GOOD = ("GoodProcess", "GoodPool", "GoodInstant", "GoodAsync", "GoodGroup")
BAD = {
    "NoMethod": "attributes",
    "Both": "attributes",
    "TwoArguments": "attributes",
    "AsyncInstant": "attributes",
    "Raises": "raises",
    "Fragile": "raises",
    "NotANumber": "value",
    "Says": "value",
    "OddParts": "value",
    "ShortList": "group",
    "Lone": "group",
    "Hangs": "ends",
    "Uncancellable": "cancellation",
    "Slow": "instant",
    "Blocks": "holds_loop",
    "Spins": "holds_loop",
    "Guesses": "deterministic",
    "LeavesTask": "left_running",
}
"""What is wrong with each, by the rule that says so."""
ELSEWHERE = {
    "RaisesElsewhere": "raises",
    "HangsElsewhere": "ends",
    "Forks": "left_running",
    "Threads": "left_running",
    "Elsewhere": "process",
}
"""The same, in processes of their own."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the loop, or was left running, is told and ended sooner than in earnest."""
    monkeypatch.setattr(stepping, "_HELD_S", 0.25)
    monkeypatch.setattr(stepping, "_FREED_S", 0.3)
    monkeypatch.setattr(leftovers, "MOMENT_S", 0.15)


@pytest.mark.parametrize("name", [*BAD, *ELSEWHERE])
def test_what_is_wrong_with_a_judger_is_found_and_nothing_else(name: str) -> None:
    """P21: one finding, under its own rule, at a line of that file."""
    report = check_judger(f"tests.support.bad_judgers:{name}", timeout_s=0.5, deterministic=True)
    assert [finding.rule for finding in report.findings] == [(BAD | ELSEWHERE)[name]]
    [finding] = report.findings
    file, _, line = finding.where.rpartition(":")
    assert Path(file).name == "bad_judgers.py"
    assert int(line) > 0
    assert finding.expected == RULES[finding.rule]


@pytest.mark.parametrize("name", GOOD)
def test_a_judger_that_does_nothing_wrong_is_let_alone(name: str) -> None:
    """Async, instant, in a process, by group: none of it is found fault with."""
    assert check_judger(f"tests.support.bad_judgers:{name}", deterministic=True).findings == ()


def test_every_rule_is_broken_by_somebody() -> None:
    """No rule of the check stands there untried."""
    assert {*BAD.values(), *ELSEWHERE.values()} == set(RULES)


def test_the_line_that_raised_is_told_from_another_process() -> None:
    """A traceback crosses the process boundary: the finding is at the line, not at the class."""
    report = check_judger("tests.support.bad_judgers:RaisesElsewhere")
    [finding] = report.findings
    file, _, line = finding.where.rpartition(":")
    assert 'sample.meta["weight"]' in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
