"""What a check found: what was done, what was expected, what happened, and where.

Invariants:

- A rule is told once, as it was broken first, with how often it was and what else came of it.
- Everything in a report can be written as JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Finding", "Report"]

_MOST_TOLD: Final = 300  # characters of what happened


@dataclass(slots=True)
class Finding:
    """One rule that was broken.

    Attributes:
        rule: short name.
        done: what the check did.
        expected: what the contract says.
        happened: what came of it.
        where: `file:line`, or empty where nobody can tell.
        times: how many of the tries broke it.
    """

    rule: str
    done: str
    expected: str
    happened: str
    where: str
    times: int = 1

    def as_json(self) -> dict[str, Any]:
        """Its record."""
        return {
            "rule": self.rule,
            "done": self.done,
            "expected": self.expected,
            "happened": self.happened,
            "where": self.where,
            "times": self.times,
        }


@dataclass(slots=True)
class Report:
    """All of a check.

    Attributes:
        kind: `agent` or `judger`.
        target: what was checked.
        rules: what is expected, by rule.
        tries: how often it was run.
        skipped: what could not be tried, and why.
        clinging: tasks that nothing ends. They are kept: whoever drops them has their code run, and maybe for ever.
    """

    kind: str
    target: str
    rules: Mapping[str, str]
    tries: int = 0
    skipped: list[str] = field(default_factory=list)
    clinging: list[asyncio.Task[Any]] = field(default_factory=list, repr=False)
    _found: dict[str, Finding] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """In the order in which they were found."""
        return tuple(self._found.values())

    def broken(self, rule: str) -> bool:
        """Whether this rule was broken already."""
        return rule in self._found

    def add(self, rule: str, done: str, happened: str, where: str = "") -> None:
        """Say that a rule was broken; only the first time is told in full."""
        known = self._found.get(rule)
        if known is None:
            self._found[rule] = Finding(rule, done, self.rules[rule], happened[:_MOST_TOLD], where)
        else:
            known.times += 1
            known.where = known.where or where

    def as_json(self) -> dict[str, Any]:
        """Its record."""
        return {
            "kind": self.kind,
            "target": self.target,
            "ok": not self._found,
            "tries": self.tries,
            "findings": [finding.as_json() for finding in self.findings],
            "skipped": self.skipped,
        }
