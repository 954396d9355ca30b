"""What a run leaves behind and shows."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from rollout_svc.demo.live import LiveView, PlainView, curve, make_view, panel
from rollout_svc.demo.records import Answer, History, StepRecord, memory_of
from rollout_svc.demo.report import running_mean, write_picture, write_summary

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = {
    "verdict": "nothing grows: seen over the last 20 steps",
    "growing": [],
    "processes": [
        {"name": "engine w0", "accounts": {"rss": {"bytes": 1, "first_bytes": 1, "bytes_per_step": 1}}},
        {
            "name": "service",
            "accounts": {"rss": {"bytes": 120_000_000, "first_bytes": 100_000_000, "bytes_per_step": -1500}},
        },
    ],
}
"""What the service said of memory."""


def history(steps: int = 40) -> History:
    ledger = {"admitted": 10, "consumed": 7, "ready": 3}
    records = [
        StepRecord(
            step=step,
            reward=min(1.0, 0.02 + step / 40),
            pause_s=0.02,
            aborted=3,
            continued=2,
            weight_version=step + 1,
            tokens=1000,
            elapsed_s=0.25,
            in_flight=5,
            ledger=ledger,
        )
        for step in range(steps)
    ]
    account = {"groups": ledger, "samples": ledger, "late_discarded": 0, "redone": 0}
    return History(chance_reward=0.02, records=records, ledger=account, memory=memory_of(MEMORY))


def test_the_summary_has_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    """First and last reward are means over five steps."""
    path = write_summary(history(), tmp_path)
    summary = json.loads(path.read_text())
    assert path.name == "summary.json"
    assert set(summary) == {"first_reward", "last_reward", "chance_reward", "max_reward", "steps", "ledger", "memory"}
    assert summary["first_reward"] == pytest.approx(0.02 + 2 / 40)
    assert summary["last_reward"] == pytest.approx(0.02 + 37 / 40)
    assert (summary["chance_reward"], summary["max_reward"]) == (0.02, 1.0)
    assert len(summary["steps"]) == 40
    for step in summary["steps"]:
        assert set(step) == {"step", "reward", "pause_s", "aborted", "continued", "weight_version"}
    assert set(summary["ledger"]) == {"groups", "samples", "late_discarded", "redone"}
    assert summary["memory"] == {
        "verdict": "nothing grows: seen over the last 20 steps",
        "growing": [],
        "rss_bytes": 120_000_000,
        "first_rss_bytes": 100_000_000,
        "rss_bytes_per_step": -1500,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path: Path, steps: int) -> None:
    """A PNG, and no half file beside it."""
    path = write_picture(history(steps), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["reward.png"]


def test_learned_means_nine_tenths_of_the_attainable() -> None:
    """The mean of the last five steps decides; no step is no success."""
    assert history().has_learned
    assert not history(30).has_learned
    assert not History(chance_reward=0.02).has_learned
    assert history().tokens_per_s == pytest.approx(4000)


def test_a_running_mean_keeps_the_ends() -> None:
    """Nine values around each, what there is of them at the ends."""
    assert running_mean([1.0, 0.0, 2.0]) == [1.0, 1.0, 1.0]
    smooth = running_mean([float(value) for value in range(20)])
    assert (smooth[0], smooth[10], smooth[19]) == (2.0, 10.0, 17.0)


def test_plain_lines_say_what_happened() -> None:
    """Step, reward, tokens, in flight, pause, aborted and continued, ledger; no control characters."""
    out = io.StringIO()
    with PlainView(out) as view:
        view.note("starting")
        view.step(history())
        view.step(history())
        view.answers("the policy at the start", [Answer("5203=", "02s", "0235", 0.4)])
        view.finish(history(), [])
    text = out.getvalue()
    assert text.count("step   39") == 1  # the second came too soon
    for word in ("reward 0.945", "4000 tokens/s", "in flight", "pause   20 ms", "aborted", "continued", "consumed 7"):
        assert word in text
    assert "5203=02s" in text
    assert "learned the task" in text
    assert "the service was at 100.0 MB at the first step, 120.0 MB at the end, -1.5 KB a step" in text
    assert "\x1b" not in text


def test_with_json_standard_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything else goes to standard error."""
    with make_view(json=True) as view:
        view.note("starting")
        view.step(history())
        view.answers("the policy", [Answer("5203=", "0235", "0235", 1.0)])
        view.finish(history(), [])
    captured = capsys.readouterr()
    assert set(json.loads(captured.out)) >= {"first_reward", "steps"}
    assert "starting" in captured.err


def test_without_a_terminal_there_is_nothing_to_redraw() -> None:
    """Captured output is no terminal."""
    assert isinstance(make_view(json=False), PlainView)


def test_the_live_view_shows_the_run() -> None:
    """Drawn on a terminal of memory: figures, ledger, answers and outcome."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with LiveView(console) as view:
        view.note("starting [engine]")
        view.step(history())
        view.answers("the policy half-way", [Answer("5203=", "0235", "0235", 1.0)])
        view.finish(history(), [])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for word in (
        "starting [engine]",
        "reward 0.945",
        "tokens/s 4,000",
        "aborted 120",
        "consumed 7",
        "5203=",
        "learned",
    ):
        assert word in text


@pytest.mark.parametrize("steps", [1, 59, 60, 61, 500])
def test_the_curve_fits_its_width(steps: int) -> None:
    """Every step is in some bar; no more than sixty bars."""
    assert len(curve([0.5] * steps)) == min(60, steps)
    assert curve([0.0, 1.0]) == "▁█"


def test_the_panel_needs_one_step() -> None:
    """The first step is enough to draw."""
    console = Console(file=io.StringIO(), width=100)
    console.print(panel(history(1)))
    assert isinstance(console.file, io.StringIO)
    assert "rollout demo" in console.file.getvalue()
