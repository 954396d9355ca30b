r"""What a piece of code is tested with, in three forms, and what came of it.

A ground truth is one of

    {"tests": [{"input": "3 4\n", "output": "7\n"}, …]}                 a program: standard input to standard output
    {"asserts": ["assert add(3, 4) == 7", …], "setup": "import math"}    statements, run after it
    {"function": "add", "cases": [{"args": [3, 4], "expected": 7}, …]}   calls, compared as JSON

Invariants:

- What is expected of a program or a function is never where the code runs: it is compared outside.
- A test that says nothing, for whatever reason, did not pass; an exit code passes no test by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from rollout_judgers.sandbox import Ran

__all__ = ["ANSWER", "HARNESS", "Asserts", "Calls", "Programs", "TestSet", "read_tests"]

ANSWER: Final = "answer.py"
"""The file that the code is in."""

HARNESS: Final = """
import json, os, sys
asked = json.loads(sys.stdin.buffer.read())
said = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
def say(number, value, say=said.write, flush=said.flush, dumps=json.dumps, mark=asked.pop("mark")):
    say(mark + dumps([number, value]) + "\\n"), flush()
space = {"__name__": "answer"}
try:
    with open("answer.py", encoding="utf-8") as file:
        exec(compile(file.read(), "answer.py", "exec"), space)
    exec(asked["setup"], space)
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
for number, statement in enumerate(asked.get("asserts", ())):
    try:
        exec(statement, space)
        say(number, True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
for number, case in enumerate(asked.get("cases", ())):
    try:
        say(number, space[asked["function"]](*case["args"], **case["kwargs"]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
os._exit(0)
"""
"""Runs asserts and calls, and says what came of each, in lines that begin with a mark."""


class Programs:
    """Tests by standard input and output: one run each."""

    def __init__(self, tests: list[Any]) -> None:
        self.inputs = [_text(test, "input", number) for number, test in enumerate(tests)]
        self.outputs = [_lines(_text(test, "output", number)) for number, test in enumerate(tests)]
        self.count = len(tests)

    def runs(self, mark: str) -> Iterator[tuple[list[str], bytes]]:  # noqa: ARG002 - as the others
        """Each run: the arguments for Python, and its standard input."""
        for text in self.inputs:
            yield [ANSWER], text.encode()

    def passed(self, run: int, ran: Ran, mark: str) -> int:  # noqa: ARG002 - as the others
        """How many tests a run passed."""
        return int(ran.exit_code == 0 and _lines(ran.stdout) == self.outputs[run])


class _Told:
    """Tests whose outcomes one run tells, line by line."""

    count: int

    def _asked(self) -> dict[str, Any]:
        raise NotImplementedError

    def _right(self, number: int, value: Any) -> bool:
        raise NotImplementedError

    def runs(self, mark: str) -> Iterator[tuple[list[str], bytes]]:
        """Each run: the arguments for Python, and its standard input."""
        yield ["-c", HARNESS], json.dumps({**self._asked(), "mark": mark}).encode()

    def passed(self, run: int, ran: Ran, mark: str) -> int:  # noqa: ARG002 - as the other
        """How many tests a run passed."""
        right = set()
        for line in ran.stdout.splitlines():
            if line.startswith(mark):
                try:
                    number, value = json.loads(line.removeprefix(mark))
                except (ValueError, TypeError, RecursionError):
                    continue
                if isinstance(number, int) and 0 <= number < self.count and self._right(number, value):
                    right.add(number)
        return len(right)


class Asserts(_Told):
    """Statements that must not raise."""

    def __init__(self, statements: list[Any], setup: str) -> None:
        self.statements = [str(statement) for statement in statements]
        self.setup = setup
        self.count = len(statements)

    def _asked(self) -> dict[str, Any]:
        return {"setup": self.setup, "asserts": self.statements}

    def _right(self, number: int, value: Any) -> bool:  # noqa: ARG002 - as the other
        return value is True


class Calls(_Told):
    """Calls of one function."""

    def __init__(self, function: str, cases: list[Any], setup: str) -> None:
        self.function = function
        self.cases = [_case(case, number) for number, case in enumerate(cases)]
        self.setup = setup
        self.count = len(cases)

    def _asked(self) -> dict[str, Any]:
        cases = [{"args": args, "kwargs": kwargs} for args, kwargs, _ in self.cases]
        return {"setup": self.setup, "function": self.function, "cases": cases}

    def _right(self, number: int, value: Any) -> bool:
        expected = self.cases[number][2]
        return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)


TestSet = Programs | Asserts | Calls


def read_tests(truth: Any) -> TestSet:
    """Read a ground truth.

    Raises:
        ValueError: it is none of the three forms, or has no test.
    """
    if isinstance(truth, str):
        truth = json.loads(truth)
    found: TestSet
    if isinstance(truth, dict) and isinstance(truth.get("tests"), list):
        found = Programs(truth["tests"])
    elif isinstance(truth, dict) and isinstance(truth.get("asserts"), list):
        found = Asserts(truth["asserts"], str(truth.get("setup", "")))
    elif isinstance(truth, dict) and isinstance(truth.get("cases"), list) and "function" in truth:
        found = Calls(str(truth["function"]), truth["cases"], str(truth.get("setup", "")))
    else:
        raise ValueError(f"ground_truth has to have tests, asserts, or function and cases, not {truth!r:.200}")
    if not found.count:
        raise ValueError("ground_truth has no test")
    return found


def _text(test: Any, key: str, number: int) -> str:
    if not isinstance(test, dict) or not isinstance(test.get(key), str):
        raise ValueError(f"ground_truth.tests.{number}.{key}: expected a text")  # noqa: TRY004 - a value in a file
    return str(test[key])


def _case(case: Any, number: int) -> tuple[list[Any], dict[str, Any], Any]:
    if not isinstance(case, dict) or "expected" not in case:
        raise ValueError(f"ground_truth.cases.{number}: expected args, kwargs (or one of them) and expected")
    args, kwargs = case.get("args", []), case.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError(f"ground_truth.cases.{number}: args is a list, kwargs has names")  # noqa: TRY004 - likewise
    return args, kwargs, case["expected"]


def _lines(text: str) -> list[str]:
    """What is compared: lines without the blanks at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
