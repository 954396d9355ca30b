"""The report that benches share."""

import json

import pytest

from bench.report import Better, Point, interleaved, print_report


@pytest.mark.parametrize(
    ("value", "bound", "better", "met"),
    [
        (8.0, 8.0, "higher", True),
        (7.9, 8.0, "higher", False),
        (2.0, 2.0, "lower", True),
        (2.1, 2.0, "lower", False),
        (99.0, None, "lower", True),
    ],
)
def test_the_last_line_is_the_report(
    capsys: pytest.CaptureFixture[str], *, value: float, bound: float | None, better: Better, met: bool
) -> None:
    """One JSON line with exactly the fields that readers look for, and `met` for all points together."""
    assert print_report("name", [Point("fine", 1.0, 1.0), Point("case", value * 2, 2.0, bound, better)]) is met
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert list(report) == ["name", "points", "met"]
    point = {"case": "case", "value": value * 2, "floor": 2.0, "ratio": value, "bound": bound, "better": better}
    assert report["points"][1] == point
    assert report["met"] is met


def test_interleaved_takes_turns_and_medians() -> None:
    """The two are measured by turns; one stray reading of each is without effect."""
    order: list[str] = []

    def reader(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop()

    ours, theirs = [1.0, 2.0, 99.0], [5.0, -99.0, 4.0]
    assert interleaved(lambda: reader("a", ours), lambda: reader("b", theirs), 3) == (2.0, 4.0)
    assert order == ["a", "b"] * 3
