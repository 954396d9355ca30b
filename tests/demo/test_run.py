"""The whole demo as a user runs it: real engines, real service, real signals; short."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTED_S = 45
"""For engines and service to start on a busy machine."""


def start(*arguments: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollout_svc", "demo", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_behind(out: Path) -> list[str]:
    """Command lines of processes of the run at `out` that still are there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.startswith(str(out)) for word in words):
            found.append(" ".join(words))
    return found


@pytest.mark.timeout(120)
def test_a_short_run_goes_all_the_way_round(tmp_path: Path) -> None:
    """Too short to learn: exit 1, near chance, a summary that adds up, weights moved at every step."""
    with start("--steps", "3", "--seed", "3", "--json", out=tmp_path) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [step["weight_version"] for step in summary["steps"]] == [1, 2, 3]
    assert abs(summary["first_reward"] - summary["chance_reward"]) < 0.05
    assert all(step["pause_s"] > 0 for step in summary["steps"])
    for column in ("groups", "samples"):
        account = dict(summary["ledger"][column])
        assert account.pop("admitted") == sum(account.values())
        assert account["failed"] == account["leased"] == account["in_flight"] == 0
    assert summary["ledger"]["groups"]["consumed"] == 3 * 16
    assert summary["ledger"]["samples"]["consumed"] == 3 * 16 * 16
    assert summary["memory"]["verdict"] == "too early to say: 3 of 20 steps were seen"
    assert summary["memory"]["rss_bytes"] > 10**7
    assert left_behind(tmp_path) == []


@pytest.mark.timeout(120)
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle: no traceback, no process, and what was seen is written; so with experts too."""
    with start("--steps", "100000", "--model", "tiny-moe", out=tmp_path) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + STARTED_S
        for line in process.stdout:
            if line.startswith("step") or time.monotonic() > deadline:
                break
        assert left_behind(tmp_path)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == "interrupted: everything that was started has ended\n"
    assert left_behind(tmp_path) == []
    assert json.loads((tmp_path / "summary.json").read_text())["steps"]
