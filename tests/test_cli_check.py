"""`rollout-svc check`: what it prints, and what it exits with."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from rollout_svc.checking.command import app
from rollout_svc.cli import main

ANSWERS = CliRunner()


def test_nothing_found_is_0() -> None:
    """A loop and a judger that are in order, by `module:attr` and by an installed name."""
    for arguments in (["agent", "single_turn"], ["judger", "rollout_judgers.exact:Exact", "--deterministic"]):
        done = ANSWERS.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "nothing found in" in done.output


def test_a_finding_is_1_and_says_what_was_done_expected_and_happened_and_where() -> None:
    """Each finding is told with its line."""
    done = ANSWERS.invoke(app, ["agent", "tests.support.bad_agents:Unsaid"])
    assert done.exit_code == 1
    assert "bad_agents.py:" in done.output
    assert "ids: turn 2: it gave 5 ids more" in done.output
    assert "expected: ctx.generate is given None" in done.output
    assert "done: ran it" in done.output


def test_what_is_checked_is_told_by_its_name() -> None:
    """P35: names between colons are no pictures."""
    done = ANSWERS.invoke(app, ["judger", "tests.support.bad_judgers:Ok"])
    assert done.output.startswith("tests.support.bad_judgers:Ok: nothing found in")


def test_what_no_cancellation_ends_does_not_keep_the_check() -> None:
    """P14: it is told, and the command ends, with the task or without."""
    command = [sys.executable, "-m", "rollout_svc", "check", "judger", "tests.support.bad_judgers:Deaf", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [item["rule"] for item in orjson.loads(done.stdout)["findings"]] == ["left_running", "ends"]


def test_a_finding_as_json() -> None:
    """The same for programs."""
    done = ANSWERS.invoke(app, ["judger", "tests.support.bad_judgers:NotANumber", "--json"])
    assert done.exit_code == 1
    record = orjson.loads(done.output)
    assert (record["kind"], record["ok"], [item["rule"] for item in record["findings"]]) == ("judger", False, ["value"])
    assert set(record["findings"][0]) == {"rule", "done", "expected", "happened", "where", "times"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["agent", "no_such_module:Agent"], "agent: cannot import 'no_such_module:Agent'"),
        (["agent", "nobody"], "agent.name: no agent named 'nobody' is installed"),
        (["judger", "rollout_judgers.regex:Regex"], "judger: 'rollout_judgers.regex:Regex': missing a required"),
        (["judger", "rollout_judgers.exact:Exact", "--option", "strict=1"], "judger.strict: "),
        (["judger", "rollout_judgers.exact:Exact", "--option", "strip"], "--option: expected key=value"),
        (["agent", "single_turn", "--prompt", "no_such_file"], "--prompt: cannot read no_such_file"),
    ],
)
def test_what_cannot_be_used_is_2_and_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P35: bad usage is one line that names the argument, and nothing is tried."""
    monkeypatch.setattr(sys, "argv", ["rollout-svc", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_the_plugin_of_the_folder_one_stands_in_is_found(tmp_path: Path) -> None:
    """As a console script it finds `module:attr` beside where it is called, and options and prompts reach it."""
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, *, wanted: str) -> None:\n"
        "        self.wanted = wanted\n"
        "    def judge(self, sample):\n"
        "        assert self.wanted == 'seven' and sample.ground_truth == '7', (self.wanted, sample)\n"
        "        return 1.0 if sample.response == '7' else float('inf')\n"
    )
    (tmp_path / "prompt.jsonl").write_text('{"text": "3 + 4 =", "ground_truth": "7"}\n')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rollout_svc", "check", "judger", "mine:Mine", "--option", "wanted=seven"),
            *("--prompt", "prompt.jsonl", "--json"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    [finding] = orjson.loads(done.stdout)["findings"]
    assert (finding["rule"], finding["done"], finding["where"]) == ("value", "had it judge a wrong answer", "mine.py:4")
