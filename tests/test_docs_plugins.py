"""What is written for people who bring agents and judgers: the examples keep the contract, and quote the check."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_svc.checking.agents import RULES as AGENT_RULES
from rollout_svc.checking.check import check_agent, check_judger
from rollout_svc.checking.command import app
from rollout_svc.checking.judgers import RULES as JUDGER_RULES
from rollout_svc.judging import JudgedSample, Reward

DOCS = Path(__file__).parent.parent / "docs"

if not DOCS.is_dir():
    pytest.skip("these tests read the documents, and only the installed package is here", allow_module_level=True)

MOST_LINES = 30


def example(page: str) -> str:
    """The one Python example of a page."""
    [found] = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of somebody's, with the examples in it, that one stands in."""
    for page, name in (("agents.md", "my_agents"), ("judgers.md", "my_judgers")):
        (tmp_path / f"{name}.py").write_text(example(page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("my_agents", "my_judgers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", ["agents.md", "judgers.md"])
def test_an_example_is_short_and_complete(page: str) -> None:
    """Under thirty lines, and it imports all that it names."""
    source = example(page)
    assert len(source.splitlines()) < MOST_LINES
    compile(ast.parse(source), page, "exec")


def test_the_agent_of_the_page_passes_its_check(folder: Path) -> None:
    """P14, P15: it keeps its ids, parks, is cancelled, and leaves nothing, with as many turns as its option says."""
    for times in (1, 3):
        report = check_agent("my_agents:Sure", options=[f"times={times}"])
        assert report.findings == ()
        assert report.tries > 20


def test_the_judger_of_the_page_passes_its_check_and_judges(folder: Path) -> None:
    """P21: it is right about right and wrong answers, and the check finds nothing."""
    assert check_judger("my_judgers:Brief", options=["price=0.01"], deterministic=True).findings == ()
    judger = importlib.import_module("my_judgers").Brief(price=0.01)
    sample = JudgedSample("s", "g", "t", None, [1], "It is 4.", [1] * 10, "4", {}, "stop")
    assert judger.judge(sample) == Reward(0.9, {"right": 1.0, "length": -0.1})


def test_the_environment_of_the_configuration_plays_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configs/guessing.py`, which `configs/agents.yaml` names: a game to its end, and the check finds nothing."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "configs"))
    game = importlib.import_module("guessing").Guessing(highest=50)
    game.reset(SimpleNamespace(ground_truth="7"))
    told = [game.step({"content": said}) for said in ("no idea", "Is it 3?", "9", "7")]
    assert [step.get("reward") for step in told] == [-0.1, None, None, 1.0]
    assert [step["messages"][0]["content"] for step in told[1:3]] == ["Higher.", "Lower."]
    assert told[-1]["done"]
    options = ['environment="guessing:Guessing"', 'environment_options={"highest": 50}']
    report = check_agent("rollout_agents.multi_turn:MultiTurn", options=options, turns=["2", "9", "4"])
    sys.modules.pop("guessing", None)
    assert report.findings == ()
    assert report.tries > 20


def test_a_finding_in_somebodys_file_is_at_its_line(folder: Path) -> None:
    """The example with one thing wrong in it is told at the line that is wrong."""
    path = folder / "my_judgers.py"
    path.write_text(path.read_text().replace("words[-1].strip", "words[0].strip").replace("bool(words) and ", ""))
    [finding] = check_judger("my_judgers:Brief").findings
    number = 1 + next(k for k, line in enumerate(path.read_text().splitlines()) if "words[0]" in line)
    assert (finding.rule, finding.where) == ("raises", f"my_judgers.py:{number}")


def test_the_pages_tell_what_the_check_expects() -> None:
    """What a page quotes of a finding is what the check says; every option of the command is on its page."""
    for page, rules, command in (("agents.md", AGENT_RULES, "agent"), ("judgers.md", JUDGER_RULES, "judger")):
        text = (DOCS / page).read_text(encoding="utf-8")
        for quoted in re.findall(r"^  expected: (.*)$", text, re.MULTILINE):
            assert quoted in rules.values()
        [found] = [
            info.callback for info in app.registered_commands if info.callback and info.callback.__name__ == command
        ]
        for name in found.__code__.co_varnames[: found.__code__.co_argcount]:
            if name != "target":
                option = name.removeprefix("as_").replace("_", "-")
                assert f"--{option}" in text, f"{page}: --{option}"
