"""Waits for Ray, found in the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import rollout_svc

PACKAGE = Path(rollout_svc.__file__).parent
LASTING = {"launching/cluster/grouped.py"}
"""Where a process is there to wait for another, as long as that lasts."""


def unbounded(path: Path) -> list[int]:
    """Lines of a file that wait for Ray without a bound."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waits = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and ast.unparse(call.func) in WAITS]
    return [call.lineno for call in waits if "timeout" not in {given.arg for given in call.keywords}]


WAITS = {"ray.get", "ray.wait"}


def test_every_wait_for_ray_has_a_bound() -> None:
    """P8: Ray waits for ever for an actor that hangs, or a tensor that no node sends; nobody here does."""
    files = {str(path.relative_to(PACKAGE)): unbounded(path) for path in PACKAGE.rglob("*.py")}
    assert {name for name, lines in files.items() if lines} == LASTING
