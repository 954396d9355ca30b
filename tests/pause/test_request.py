"""What may be asked of a pause; P8 P35."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import PauseConfig
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, MODES
from rollout_svc.pause.request import Asked, Terms, read_terms

CONFIG = PauseConfig(mode="wait", deadline_s=7.0)
WORDS = st.sampled_from([*MODES, "stop", ""])


@given(
    mode=st.none() | WORDS,
    deadline_s=st.none() | st.floats(),
    lanes=st.lists(st.sampled_from([*LANES, "test"]), max_size=3).map(tuple),
    kv=st.sampled_from(["keep", "drop", "cold"]),
)
def test_what_was_read_can_be_done(mode: str | None, deadline_s: float | None, lanes: tuple[str, ...], kv: str) -> None:
    """P8 P35: terms have a deadline in finite time, known lanes and words; all else is refused, at the first field."""
    asked = Asked(mode, deadline_s, lanes, None, kv, ())  # type: ignore[arg-type]
    how = mode or CONFIG.mode
    wrong = [
        *(["deadline_s"] if deadline_s is not None and not 0 < deadline_s < math.inf else []),
        *(["lanes"] if not lanes or "test" in lanes else []),
        *(["mode"] if how not in MODES else []),
        *(["kv"] if kv == "cold" else []),
        *(["lanes"] if how == "keep" and set(lanes) != set(LANES) else []),
    ]
    if not wrong:
        given_s = CONFIG.deadline_s if deadline_s is None else deadline_s
        assert read_terms(asked, CONFIG, ()) == Terms(how, kv, given_s, lanes)  # type: ignore[arg-type]
        return
    with pytest.raises(BadRequest) as refused:
        read_terms(asked, CONFIG, ())
    assert [problem["path"] for problem in refused.value.detail] == wrong[:1]


def test_what_is_not_said_is_as_configured() -> None:
    """P35: a pause without a word of its own has the mode and the deadline of the configuration."""
    assert read_terms(Asked(None, None, LANES, None, "keep", ()), CONFIG, ()) == Terms("wait", "keep", 7.0, LANES)
