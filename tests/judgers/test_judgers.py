"""`exact`, `regex` and `function`: what they call right, what wrong, and what they refuse to judge."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_judgers.exact import Exact
from rollout_judgers.function import Function
from rollout_judgers.regex import Regex
from rollout_judgers.reported import Reported
from rollout_svc.errors import SampleFailure
from rollout_svc.judging import JudgeDesk, Reward
from rollout_svc.plugins import PluginSpec
from tests.support.court import Court, a_sample
from tests.support.virtual import virtual

PLAIN = "tests.support.judgers:plain"
AWAITED = "tests.support.judgers:awaited"


def desk_of(judger: Any) -> JudgeDesk:
    """Put a judger behind a desk, which looks at what kind it is."""
    return JudgeDesk(name="j", judger=judger, spec=PluginSpec("m:a", {}), timeout_s=1)


# -- exact ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "response", "truth", "value"),
    [
        ({}, "42", "42", 1.0),
        ({}, " 42\n", "42 ", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "43", "42", 0.0),
        ({}, "", "42", 0.0),
        ({}, "", "", 1.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({"strip": False}, " 42", " 42", 1.0),
    ],
)
def test_exact_compares_texts(options: dict[str, Any], response: str, truth: Any, value: float) -> None:
    """The response is the ground truth, or it is not."""
    assert Exact(**options).judge(a_sample(response=response, truth=truth)) == Reward(value)


@pytest.mark.parametrize(("truth", "value"), [([2, 3], 1.0), ([3, 2], 0.0), ([], 0.0)])
@pytest.mark.parametrize("response", ["text", None])
def test_exact_compares_token_ids(truth: list[int], value: float, response: str | None) -> None:
    """A list is token ids, with a tokenizer or without."""
    assert Exact().judge(a_sample(response=response, truth=truth)) == Reward(value)


@pytest.mark.parametrize(("response", "truth"), [("text", None), (None, "text"), (None, None)])
def test_exact_refuses_what_it_cannot_compare(response: str | None, truth: Any) -> None:
    """Nothing to compare with, or nothing to compare, is an error: not a 0."""  # P2
    with pytest.raises(ValueError, match="ground_truth"):
        Exact().judge(a_sample(response=response, truth=truth))


# -- regex ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "response", "truth", "value"),
    [
        ({"pattern": r"\d+"}, "it is 42", None, 1.0),
        ({"pattern": r"\d+"}, "no idea", None, 0.0),
        ({"pattern": r"answer: (\d+)"}, "answer: 42", "42", 1.0),
        ({"pattern": r"answer: (\d+)"}, "answer: 41, no, answer: 42", 42, 1.0),
        ({"pattern": r"answer: (\d+)"}, "answer: 42, no, answer: 41", "42", 0.0),
        ({"pattern": r"answer: (\d+)"}, "42", "42", 0.0),
        ({"pattern": r"<(.*?)>"}, "< 42 >", " 42", 1.0),
        ({"pattern": r"(\w+) (\w+)"}, "one two", "one", 1.0),
        ({"pattern": r"a(b)?"}, "a", "b", 0.0),
        ({"pattern": r"ANSWER: (\w+)"}, "answer: Yes", "yes", 0.0),
        ({"pattern": r"ANSWER: (\w+)", "ignore_case": True}, "answer: Yes", "yes", 1.0),
    ],
)
def test_regex_compares_the_last_match(options: dict[str, Any], response: str, truth: Any, value: float) -> None:
    """Without a group a match is enough; with one, what the last match found has to be the ground truth."""
    assert Regex(**options).judge(a_sample(response=response, truth=truth)) == Reward(value)


@given(st.text(alphabet="ab<> \n", max_size=20))
def test_regex_agrees_with_all_matches(text: str) -> None:
    """The last of all matches decides, whatever stands around it."""
    found = re.findall(r"<(\w*)>", text)
    reward = Regex(pattern=r"<(\w*)>").judge(a_sample(response=text, truth="a"))
    assert reward.value == float(bool(found) and found[-1] == "a")


def test_regex_refuses_what_it_cannot_compare() -> None:
    """Without text, or with a group and no ground truth, nobody is judged; a bad pattern is refused at once."""  # P2
    with pytest.raises(ValueError, match="text"):
        Regex(pattern="x").judge(a_sample(response=None))
    with pytest.raises(ValueError, match="ground_truth"):
        Regex(pattern="(x)").judge(a_sample(response="x", truth=None))
    with pytest.raises(re.error):
        Regex(pattern="(")


def test_regex_runs_in_a_process() -> None:
    """A pattern that backtracks for ever has to be killed; `exact` only compares, and needs no process."""  # P21
    desk = desk_of(Regex(pattern="x"))
    assert (desk.is_async, desk.instant) == (False, False)
    assert desk_of(Exact()).instant


# -- function ------------------------------------------------------------------------------------------------


def test_a_plain_function_runs_in_a_process() -> None:
    """Any function of a sample is a judger; its keyword arguments go along."""
    judger = Function(function=PLAIN, kwargs={"bonus": 0.5})
    assert judger.judge(a_sample(response="truth")) == 1.5
    assert Function(function=PLAIN).judge(a_sample(response="other")) == 0.0
    assert not desk_of(judger).is_async


@virtual
async def test_an_async_function_runs_in_the_loop() -> None:
    """An async function needs no process."""
    court = Court(Function(function=AWAITED, kwargs={"bonus": 0.5}))
    assert court.desk.is_async
    assert await court.ask() == [Reward(0.5)]


def test_what_cannot_be_called_is_no_judger() -> None:
    """A name that is no function, or is not there, is refused when the judger is made."""  # P35
    with pytest.raises(TypeError, match="not callable"):
        Function(function="rollout_svc.judging:__all__")
    with pytest.raises(ImportError):
        Function(function="no_such_module:f")
    with pytest.raises(AttributeError):
        Function(function="rollout_svc.judging:no_such_name")


# -- reported ------------------------------------------------------------------------------------------------


@virtual
async def test_reported_gives_what_was_told() -> None:
    """P21: a reward that nobody told is a typed failure, never a 0; one of 0 is a reward."""
    court = Court(Reported())
    for value in (0.0, -2.5):
        told = replace(a_sample(), reported=value)
        assert await court.judging.judge(court.desk, "train", [told]) == [Reward(value)]
    with pytest.raises(SampleFailure, match=r"judge_error: .*no reward was reported"):
        await court.judging.judge(court.desk, "train", [a_sample()])
