"""Real numbers, whoever's they are."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.judging import Reward
from rollout_svc.judging.values import plain
from rollout_svc.real import as_real

SCALARS: list[Any] = [
    *(0.5, 3, Fraction(1, 2), np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble(0.5), np.int64(3)),
    *(np.array(0.5), np.array(3), torch.tensor(0.5), torch.tensor(3), torch.tensor(0.5, requires_grad=True)),
]
OTHERS: list[Any] = [
    *(None, "0.5", b"1", 1j, [0.5], (0.5,), {}, object(), np.str_("0.5"), np.complex64(1), np.datetime64("2020")),
    *(np.array([0.5]), torch.tensor([0.5]), torch.tensor([]), torch.tensor(1j), np.array(None), np.array("0.5")),
    *(math.nan, math.inf, np.float32("nan"), np.float32("-inf"), torch.tensor(math.nan), np.array(math.inf), 10**400),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_one_finite_real_number_is_taken(value: Any) -> None:
    """Whoever's it is; it comes out as Python's own float."""
    assert as_real(value) == (3.0 if int(value) else 0.5)
    assert type(as_real(value)) is float


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_anything_else_is_none(value: Any) -> None:
    """P2: NaN, infinity, what has a length, and what only looks like a number."""
    assert as_real(value) is None


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), torch.tensor(True)])
def test_a_truth_value_is_one_or_zero(value: Any) -> None:
    """`return answer == truth` is a grader, whoever compares."""
    assert (as_real(value), as_real(value ^ value)) == (1.0, 0.0)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_scalar_is_worth_what_its_float_is(value: float) -> None:
    """In every wrapping alike."""
    expected = value if math.isfinite(value) else None
    wrapped = (value, np.float64(value), np.array(value), torch.tensor(value, dtype=torch.float64))
    assert [as_real(one) for one in wrapped] == [expected] * len(wrapped)


def test_a_verdict_crosses_without_the_library_it_was_made_with() -> None:
    """Reading one must not import torch in the service's loop; what is no scalar crosses as it is."""
    made = [torch.tensor(0.5), Reward(np.float32(0.5), {"a": torch.tensor(1)}), "no", {"kept": 1}]  # type: ignore[arg-type,dict-item]
    written = pickle.dumps(plain(made))
    assert b"torch" not in written
    assert b"numpy" not in written
    assert pickle.loads(written) == [0.5, Reward(0.5, {"a": 1}), "no", {"kept": 1}]  # noqa: S301 - our own bytes
