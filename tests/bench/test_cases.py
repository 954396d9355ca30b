"""The cases of the benches, and the arithmetic of their figures."""

import pytest

from bench import dispatch, refill, sessions
from bench.report import Point


def test_refill_has_its_sixteen_cases() -> None:
    """Spreads, group sizes, slots and workers, two of each; where slots are many, requests are long."""
    names = [case.name for case in refill.CASES]
    assert len(set(names)) == 16
    assert (names[0], names[-1]) == ("uniform-n1-64x1", "lognormal-n8-1024x8")
    assert {case.mean_s for case in refill.CASES if case.all_slots <= 1024} == {2.0}
    assert {case.mean_s for case in refill.CASES if case.all_slots > 1024} == {20.0}


def test_a_share_is_of_every_engine_by_its_own_clock() -> None:
    """Two engines of four slots, looked at for 2 s and for 4 s: 24 slot-seconds."""
    before = refill.Busy((10.0, 20.0), (100.0, 100.0))
    after = refill.Busy((18.0, 30.0), (102.0, 104.0))
    assert after.share_since(before, 4) == pytest.approx(18 / 24)


def test_every_dialect_has_every_size() -> None:
    """And SGLang's cases have no prefix; growth is told where both ends were measured."""
    assert [case.name for case in dispatch.CASES[:4]] == ["64", "512", "2048", "vllm-64"]
    points = [Point("vllm-64", 1.0, 1.0), Point("vllm-2048", 1.1, 1.0), Point("lmdeploy-64", 1.0, 1.0)]
    assert [(point.case, point.ratio) for point in dispatch.growth(points)] == [("vllm-growth", 1.1)]


def test_a_turn_is_told_per_new_token() -> None:
    """The five turns around it, over what they added to the conversation: 100 tokens each, 16 agents."""
    prompts = [100 * turn for turn in range(1, 131)]
    cpu = [0.016] * 120 + [0.032] * 10
    assert sessions.per_new_token(cpu, prompts, 8) == pytest.approx(10.0)
    assert sessions.per_new_token(cpu, prompts, 128) == pytest.approx(20.0)
    assert list(sessions.CASES) == ["turn", "turns128"]
