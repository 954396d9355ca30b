"""`math`: what is worth the same, what is not, and what cannot be judged. Needs the extra `math`."""

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest

from rollout_judgers.math import Math, as_math
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.gate import Gate
from rollout_svc.judging import JudgeDesk, JudgeFailed, Judging
from rollout_svc.judging.processes import JudgePool
from rollout_svc.plugins import PluginSpec
from rollout_svc.tasks import TaskOwner
from tests.support.court import a_sample

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed (extra `math`)")


@pytest.mark.parametrize(
    ("truth", "read"),
    [
        ("42", "42"),
        ("1/2", "1/2"),
        ("1,000", "1,000"),
        ("-0.5", "-0.5"),
        ("12%", "12%"),
        ("(1 + 2) / 3", "(1 + 2) / 3"),
        ("(1, 2)", "$(1, 2)$"),
        ("x", "$x$"),
        ("x + y", "$x + y$"),
        ("2x + 1", "$2x + 1$"),
        ("no number", "no number"),
        (r"\frac{1}{2}", r"$\frac{1}{2}$"),
        ("x^2", "$x^2$"),
        ("$x^2$", "$x^2$"),
        (r"\boxed{3}", r"\boxed{3}"),
        (r"so \(x\)", r"so \(x\)"),
    ],
)
def test_a_bare_formula_is_put_between_dollars(truth: str, read: str) -> None:
    """Datasets write ground truths with and without them."""
    assert as_math(truth) == read


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="math-verify is installed")
def test_without_the_extra_it_says_what_to_install() -> None:
    """One line, before anything starts."""  # P35
    with pytest.raises(ConfigError, match=r"rollout-svc\[math\]"):
        Math()


@pytest.mark.parametrize("options", [{"decimals": 0}, {"decimals": "6"}, {"missing": "0"}, {"missing": True}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    """A bad value is told at its option."""  # P35
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}: "):
        Math(**options)


@needs_math
@pytest.mark.parametrize(
    ("truth", "response", "value"),
    [
        ("42", "The answer is 42.", 1.0),
        ("42", "The answer is 43.", 0.0),
        (42, r"so \boxed{42}", 1.0),
        ("1/2", r"$\frac{1}{2}$", 1.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\frac{3}{4}", r"the answer is $0.75$", 1.0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
        ("x^2 + 2x + 1", r"$(x+1)^2$", 1.0),
        ("x^2 + 2x + 1", r"$(x+2)^2$", 0.0),
        ("1,000", "The answer is 1000", 1.0),
        ("(1, 2)", r"$(1, 2)$", 1.0),
        ("(1, 2)", r"$(2, 1)$", 0.0),
        ("7", "I do not know", 0.0),
        pytest.param("7", "7" * 5000, 0.0, id="a number without an end"),
    ],
)
def test_answers_are_compared_by_worth(truth: Any, response: str, value: float) -> None:
    """Formulas and numbers, however they are written."""
    assert Math().judge(a_sample(response=response, truth=truth)).value == value


@needs_math
@pytest.mark.parametrize(
    ("options", "response", "truth", "told"),
    [
        ({}, None, "1", "no_text"),
        ({}, "1", None, "no_ground_truth"),
        ({}, "1", "no number", "ground_truth"),
        ({"missing": None}, "I do not know", "1", "no_answer"),
    ],
)
def test_what_cannot_be_judged_is_never_0(options: dict[str, Any], response: Any, truth: Any, told: str) -> None:
    """Nothing to compare with is a failure with a reason."""  # P2
    with pytest.raises(JudgeFailed, match=told):
        Math(**options).judge(a_sample(response=response, truth=truth))


@needs_math
async def test_a_formula_that_never_ends_is_killed() -> None:
    """The judge process is killed at the timeout, and the next sample is judged."""  # P21
    runner = JudgePool(1)
    judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=runner)
    spec = PluginSpec("rollout_judgers.math:Math", {})
    try:
        async with asyncio.timeout(50):
            desk = JudgeDesk(name="math", judger=Math(), spec=spec, timeout_s=30)
            good = a_sample(response=r"\boxed{2}", truth="2")
            assert (await judging.judge(desk, "train", [good]))[0].value == 1.0
            desk.timeout_s = 0.5
            with pytest.raises(SampleFailure, match="judge_timeout"):
                await judging.judge(
                    desk, "train", [a_sample(response=r"$10^{10^{10^{10}}}!$", truth=r"$9^{9^{9^{9}}}!$")]
                )
    finally:
        await runner.close()
