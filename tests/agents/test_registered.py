"""What the project registers can be made by its name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.plugins import PluginSpec, construct

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
OPTIONS: dict[str, dict[str, Any]] = {
    "multi_turn": {"environment": "tests.support.environments:Scripted"},
    "tools": {"tools": ["tests.support.tools:add"]},
    "reported": {},
}


@pytest.mark.skipif(not PROJECT.is_file(), reason="only the installed package is here")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_name_stands_for_a_plugin(name: str) -> None:
    """The table of entry points leads to something that can be made, with `run` or `judge`."""
    tables = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    known = tables["rollout_svc.agents"] | tables["rollout_svc.judgers"]
    made = construct(PluginSpec(known[name], OPTIONS[name]), name)
    assert hasattr(made, "run") or hasattr(made, "judge")
