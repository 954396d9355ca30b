"""What a take may ask, and why there is nothing to take; P22 P32 P35."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.batch import Shortage, check_take, is_ahead, too_far
from rollout_svc.errors import BadRequest

NUMBER = st.integers(-3, 3) | st.booleans() | st.floats() | st.none()


@given(step=NUMBER, groups=NUMBER, timeout_s=st.floats() | st.integers(-3, 3))
def test_a_take_that_no_schedule_can_reckon_with_is_refused(step: Any, groups: Any, timeout_s: float) -> None:
    """P35: whole numbers and a finite time, in process as over HTTP; the first that is none is named."""
    wrong = [
        *(["step"] if type(step) is not int or step < 0 else []),
        *(["groups"] if type(groups) is not int or groups < 1 else []),
        *(["timeout_s"] if not 0 <= timeout_s < math.inf else []),
    ]
    if not wrong:
        check_take(step, groups, timeout_s)
        return
    with pytest.raises(BadRequest) as refused:
        check_take(step, groups, timeout_s)
    assert [problem["path"] for problem in refused.value.detail] == wrong[:1]


@given(
    step=st.integers(0, 50), version=st.integers(0, 50), groups=st.integers(0, 5), tokens=st.none() | st.integers(0, 5)
)
def test_what_is_too_far_says_which_weights_it_needs(step: int, version: int, groups: int, tokens: int | None) -> None:
    """P22 P32: the bound of tokens counts where there is one, else that of groups; an update may still bring it."""
    shortage = too_far(step, version, groups, tokens)
    needed = step - (groups if tokens is None else tokens)
    assert shortage.message == f"step {step} needs weights of version {needed} or later, the fleet is at {version}"
    assert shortage.detail.get("max_token_staleness") == tokens
    assert not shortage.final


@given(
    step=st.integers(0, 50), version=st.integers(0, 50), groups=st.integers(0, 5), tokens=st.none() | st.integers(0, 5)
)
def test_a_step_is_ahead_until_the_weights_it_needs_are_there(
    step: int, version: int, groups: int, tokens: int | None
) -> None:
    """P32: a step can be served with the weights that its shortage names, or later ones, and with none before."""
    bound = groups if tokens is None else tokens
    assert is_ahead(step, version, groups, tokens) == (version < step - bound)


def test_the_tasks_that_are_waited_for_are_named() -> None:
    """P22: where enough is ready in sum, a take says of which tasks it is not; what is final stays as it is."""
    shortage = Shortage("not_enough", "2 are under way", {"ready": 3})
    told = shortage.of_tasks({"sort": 2})
    assert told.message == "by the tasks' weights 2 of task sort are missing; 2 are under way"
    assert told.detail == {"ready": 3, "missing": {"sort": 2}}
    assert shortage.of_tasks({}) is shortage
    final = Shortage("failed", "it died", {}, final=True)
    assert final.of_tasks({"sort": 2}) is final
