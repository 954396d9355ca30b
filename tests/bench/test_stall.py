"""What `bench.stall` sends, and the arithmetic of its figures."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest

from bench.bare import WIRES
from bench.stall import __main__ as stall
from bench.stall.bodies import ENCODINGS, KEY, LAYERS, TOP_K, body
from bench.stall.client import late
from rollout_svc.engines.calls import Lift
from rollout_svc.engines.lifting import Lifting

SIZE = 200_000


def test_bodies_are_answers_of_their_size() -> None:
    """Nearly all of it is routed experts, the same model's in both encodings, and the rest is an answer."""
    for encoding in ENCODINGS:
        whole = body(encoding, SIZE)
        answer = orjson.loads(whole)
        assert 0 <= SIZE - len(whole) < 10_000
        assert len(WIRES["sglang"].read(answer)[0]) == 256
        if encoding == "nested":
            assert np.shape(answer["meta_info"][KEY])[1:] == (LAYERS, TOP_K)


async def test_bodies_can_be_lifted() -> None:
    """What the bench reads is what the service would."""
    with ThreadPoolExecutor(1) as threads:
        for encoding in ENCODINGS:
            reading = Lifting(Lift(KEY, "base64" if encoding == "base64" else "numbers", 1 << 30), threads, SIZE)
            rest = await reading.feed(body(encoding, SIZE))
            last, value = await reading.finish()
            assert orjson.loads(rest + last)["meta_info"][KEY] is None
            rows = np.frombuffer(value, "<i4").reshape(-1, LAYERS, TOP_K) if encoding == "base64" else value
            assert rows.shape[1:] == (LAYERS, TOP_K)
            assert 0 <= rows.min() < rows.max() < 128


def test_a_late_look_counts_for_all_that_were_due() -> None:
    """A loop that stood still for 3.5 ms was late by 3.5, 2.5, 1.5 and 0.5 ms."""
    found, due = late(1.0, 1.0035)
    assert found == pytest.approx([0.0035, 0.0025, 0.0015, 0.0005])
    assert due == pytest.approx(1.004)
    assert late(2.0, 1.9995) == ([], 2.0)


def test_points_are_medians_beside_their_floors() -> None:
    """Lag must be low, rates high; small requests count where fewer of them were answered."""

    def figures(lag: float, big: float, small: float) -> dict[str, float]:
        return {"lag_p999_ms": lag, "big_per_s": big, "small_per_s": small}

    quiet = {
        "none": figures(1, 0, 100),
        "discard-base64": figures(2, 9, 100),
        "read-base64": figures(80, 4, 90),
        "lift-base64": figures(4, 6, 95),
        "discard-nested": figures(2, 9, 100),
        "lift-nested": figures(8, 1, 85),
    }
    loud = {way: figures(100, 1, 1) for way in quiet}
    found = {point.case: point for point in stall.points([quiet, loud, quiet], list(stall.NEEDS))}
    assert {case: (point.value, point.floor, point.better) for case, point in found.items()} == {
        "base64-lag": (4, 2, "lower"),
        "nested-lag": (8, 2, "lower"),
        "base64-rate": (6, 4, "higher"),
        "small": (85, 100, "higher"),
    }
    assert [point.met for point in found.values()] == [True, False, True, True]
