"""The `code` judger: extracts, runs, counts; and is not talked into a reward."""

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollout_judgers.code import Code
from rollout_judgers.sandbox import choose
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.gate import Gate
from rollout_svc.judging import JudgeDesk, Judging, Reward
from rollout_svc.judging.processes import JudgePool
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.tasks import TaskOwner
from tests.support.court import a_sample
from tests.support.processes import lives

AUTO = choose("auto")
pytestmark = pytest.mark.skipif(isinstance(AUTO, str), reason=str(AUTO))

SUMS = {"tests": [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1\n", "output": "2"}]}
ASSERTS = {"setup": "import math", "asserts": ["assert f(2) == math.factorial(2)", "assert f(3) == 6"]}
CASES = {"function": "f", "cases": [{"args": [2], "expected": 4}, {"kwargs": {"x": 3}, "expected": 9}]}


def judge(response: str, truth: Any, **options: Any) -> Reward:
    """Judge a response."""
    return Code(**options).judge(a_sample(response=response, truth=truth))


def test_a_program_is_tested_by_what_it_prints() -> None:
    """Blanks at the ends of lines do not count; half right is half a reward, or none where all is asked."""
    right = "Here:\n```python\nprint('no')\n```\nbetter:\n```python\nprint(sum(map(int, input().split())), ' ')\n```\n"
    assert judge(right, SUMS) == Reward(1.0, {"passed": 2, "tests": 2})
    assert judge(right, SUMS, block="first").value == 0.0
    assert judge("print(7)", SUMS).value == 0.5
    assert judge("print(2)", SUMS, reward="all") == Reward(0.0, {"passed": 0, "tests": 2})


@pytest.mark.parametrize(
    ("response", "truth", "share"),
    [
        ("def f(n): return n if n < 3 else 6", ASSERTS, 1.0),
        ("def f(n): return 2", ASSERTS, 0.5),
        ("def f(x): return x * x", CASES, 1.0),
        ("1. So:\n   ```python\n   def f(x):\n       return x * x\n   ```\n2. That is all.", CASES, 1.0),
        ("def f(x):\n  print('loud')\n  return 4", CASES, 0.5),
        ("def g(x): return 4", CASES, 0.0),
        ("def f(:", CASES, 0.0),
        ("", CASES, 0.0),
    ],
)
def test_functions_are_tested_by_what_they_do(response: str, truth: Any, share: float) -> None:
    """Each assert and each case counts by itself; what the code prints is not mistaken for an outcome."""
    assert judge(response, truth).value == share


@pytest.mark.parametrize(
    "response",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import os\nos.kill(os.getpid(), 9)",
        "print('[0, true]\\n[1, true]')",
        "def f(*_, **__):\n  import os\n  os._exit(0)",
        "import sys\nsys.stdout.write('x' * 10_000_000)\nprint('x' * 100_000)",
    ],
)
@pytest.mark.parametrize("truth", [SUMS, ASSERTS, CASES], ids=["programs", "asserts", "cases"])
def test_ending_well_passes_no_test(response: str, truth: Any) -> None:
    """An exit code of 0, an end in the middle, or a flood is not a passed test."""
    assert judge(response, truth, test_timeout_s=5.0, total_s=5.0).value == 0.0


def test_a_hang_costs_what_was_not_reached() -> None:
    """The tests before it count, those after it do not, and the whole is bounded."""
    begun = time.monotonic()
    slow = "def f(x):\n  while x == 3: pass\n  return 4"
    assert judge(slow, CASES, test_timeout_s=0.5).value == 0.5
    many = {"tests": [{"input": "", "output": "x"}] * 50}
    assert judge("while True: pass", many, test_timeout_s=0.3, total_s=0.6).value == 0.0
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize(
    "truth", [None, {}, {"tests": []}, {"tests": [{"input": 1}]}, {"function": "f", "cases": [{"args": 1}]}, "{]"]
)
def test_a_ground_truth_that_is_none_is_an_error(truth: Any) -> None:
    """It is the task that is wrong, not the answer: never 0."""
    with pytest.raises(ValueError, match=r"ground_truth|Expecting"):
        judge("print(1)", truth)


def test_without_walls_it_refuses_or_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sandbox works it is a config error, at its path, unless none was asked for, and that is said."""
    monkeypatch.setattr("rollout_judgers.code.choose", lambda *_: "unshare: not permitted")
    with pytest.raises(ConfigError, match=r"tasks.0.judger.*no sandbox works here .unshare: not permitted."):
        construct(PluginSpec("rollout_judgers.code:Code", {}), "tasks.0.judger")
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="without walls"):
        assert judge("print(sum(map(int, input().split())))", SUMS, sandbox="none").value == 1.0


async def test_a_judge_call_that_is_killed_takes_its_sandbox_with_it() -> None:
    """At the judge's own timeout nothing is left of what the answer started, and the next one is judged."""  # P21
    pool = JudgePool(max_workers=1)
    judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=pool)
    spec = PluginSpec("rollout_judgers.code:Code", {"total_s": 30.0, "test_timeout_s": 30.0})
    hung = "import os, time\nos.fork()\nos.fork() or os.setsid()\ntime.sleep(600)"
    slow = JudgeDesk(name="slow", judger=construct(spec, "judger"), spec=spec, timeout_s=1.5)
    with pytest.raises(SampleFailure, match="judge_timeout"):
        await judging.judge(slow, "train", [a_sample(response=hung, truth=SUMS)])
    assert not _left()
    assert (await judging.judge(slow, "train", [a_sample(response="print(7)", truth=SUMS)]))[0].value == 0.5
    await pool.close()


def _left() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*") if _runs_answer(path) and lives(int(path.name))]


def _runs_answer(path: Path) -> bool:
    try:
        return (path / "cmdline").read_bytes().endswith(b"\0answer.py\0")
    except OSError:
        return False


def test_it_is_registered_by_its_name() -> None:
    """`name: code` finds it."""
    table = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert table["project"]["entry-points"]["rollout_svc.judgers"]["code"] == "rollout_judgers.code:Code"
