"""How often the service looks at engines here: as in production, but for the scale.

Every rule holds at any scale; at that of production a test that waits for the third look would wait for seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest

from rollout_svc.workers import breaker, canary, supervisor
from tests.support.fake_sglang import FakeSGLang

PACE: Final = {
    (canary, "_BOUND_S"): 1.0,
    (supervisor, "_FIRST_REACH_S"): 0.1,
    (supervisor, "_GONE_S"): 0.2,
    (supervisor, "_PROBE_S"): 0.4,
    (supervisor, "_REACH_OURS_S"): 0.2,
    (supervisor, "_RESIDUAL_POLL_S"): 0.1,
    (breaker, "BASE_S"): 0.1,
}
"""Seconds, by the constant they stand for."""


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), seconds in PACE.items():
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[FakeSGLang]:
    """Run an engine that answers at once, as `answered` of the test's file does."""
    async with FakeSGLang(weight_version="0") as made:
        made.answer = request.module.answered
        yield made
