"""A preflight for people: a table on a terminal, lines elsewhere, and nothing an engine says is taken as markup."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.observe.preflight_table import show_preflight

REPORT: dict[str, Any] = {
    "ok": False,
    "workers": [
        {
            "id": "w0",
            "url": "http://a",
            "limit": 7,
            "failure": None,
            "launched": False,
            "dialect": "sglang",
            "engine_version": "1",
            "model": "[red]m",
            "tokenizer": None,
            "vocab_size": None,
            "context": 64,
            "max_running": 8,
            "logprobs": "raw",
            "weight_label": "0",
            "capabilities": ["abort", "count"],
        },
        {"id": "w1", "url": "http://b", "limit": 7, "failure": "connection: [/x] refused", "launched": False},
    ],
    "cluster": None,
    "plan": {"workers": 2, "required": 7, "warnings": ["raised"]},
    "warnings": [{"path": "workers.0", "message": "doubtful"}],
    "problems": [{"path": "workers.1.url", "message": "w1 cannot be reached: [/x] refused"}],
}


FIRST = (
    "w0 http://a dialect=sglang engine_version=1 model=[red]m vocab_size=? context=64 max_running=8 logprobs=raw "
    "weight_label=0 tokenizer=? limit=7 can=abort,count"
)


def test_elsewhere_it_is_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line whole, in order: workers, plan, warnings, problems, and the sum."""
    show_preflight(REPORT)
    assert capsys.readouterr().out.splitlines() == [
        FIRST,
        "w1 http://b limit=7 failure='connection: [/x] refused'",
        "plan: workers 2  required 7",
        "warning: raised",
        "warning: workers.0: doubtful",
        "problem: workers.1.url: w1 cannot be reached: [/x] refused",
        "1 would fail",
    ]


def test_on_a_terminal_it_is_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each worker; one without an answer says so, and its words are among the problems."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    show_preflight(REPORT)
    said = capsys.readouterr().out
    assert "[red]m" in said
    assert "no answer" in said
    assert "w0 can abort,count" in said
    assert "workers.1.url: w1 cannot be reached: [/x] refused" in said
