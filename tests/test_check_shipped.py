"""What comes with the service keeps the contract that its check asks of others."""

import json
import tomllib
from pathlib import Path

import pytest

from rollout_svc.checking.check import check_agent, check_judger

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

if not PROJECT.is_file():
    pytest.skip("the plugins are read from pyproject.toml, which is not installed", allow_module_level=True)

TABLES = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
AGENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "single_turn": ((), ()),
    "multi_turn": (('environment="tests.support.nudging:Nudging"',), ()),
    "tools": (('tools=["tests.support.tools:weather"]',), (CALL, CALL + CALL, "Cold.")),
}
"""Options by which each can be tried, and what the model says."""
JUDGERS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "regex": ("pattern=(\\d+)",),
    "function": ('function="tests.support.judgers:awaited"',),
    "reported": (),
    "code": ("test_timeout_s=2.0",),
}
"""The same, for judgers."""
TRUTHS = {"code": {"function": "double", "cases": [{"args": [2], "expected": 4}]}}
"""Ground truths that are no sums."""
ELSEWHERE: frozenset[str] = frozenset()
"""Those that need more than options, and are checked by tests of their own."""


@pytest.mark.parametrize("name", sorted(TABLES["rollout_svc.agents"].keys() - ELSEWHERE))
def test_shipped_loops_pass(name: str) -> None:
    """Every agent loop of the package."""
    if name not in AGENTS:
        pytest.skip(f"no options are known for {name}: add them to AGENTS, or name it in ELSEWHERE")
    options, turns = AGENTS[name]
    report = check_agent(TABLES["rollout_svc.agents"][name], options=options, turns=turns)
    assert report.findings == ()
    assert report.tries > 0


@pytest.mark.parametrize("name", sorted(TABLES["rollout_svc.judgers"].keys() - ELSEWHERE))
def test_shipped_judgers_pass(name: str, tmp_path: Path) -> None:
    """Every judger of the package."""
    if name not in JUDGERS:
        pytest.skip(f"no options are known for {name}: add them to JUDGERS, or name it in ELSEWHERE")
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text(json.dumps({"text": "2 + 2 = ?", "ground_truth": TRUTHS.get(name, "4")}))
    target = TABLES["rollout_svc.judgers"][name]
    report = check_judger(target, options=JUDGERS[name], prompt=prompt, deterministic=True)
    assert report.findings == ()
    assert report.tries > 0
