"""What the fuzzer finds in the control API: nothing; and that it would find something. `make fuzz` asks for longer."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.service import RolloutService
from tests.rpc.fuzz import STATES, State, fuzz

SEED = 5
EXAMPLES = 10


@pytest.mark.parametrize("state", STATES)
def test_whatever_is_sent_the_answer_is_a_described_one(state: State) -> None:
    """Edges of every schema and random bodies, in each state: no status, key or header that is not described."""  # P35
    outcome = fuzz(state, seed=SEED, examples=EXAMPLES)
    assert outcome.findings == []
    dead = {500} if state == "failed" else set[int]()  # what `/healthz` then answers
    assert set(outcome.by_status) <= {200, 201, 202, 400, 401, 404, 405, 409, 413, 503} | dead
    assert {200, 400, 401} <= set(outcome.by_status)  # it came through to the calls, and was refused by them
    assert (503 in outcome.by_status) >= (state in {"starting", "failed"})


@pytest.mark.parametrize(
    ("plan", "check"), [({"workers": -1}, "response_schema_conformance"), (None, "status_code_conformance")]
)
def test_the_fuzzer_finds_what_is_not_described(plan: Any, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of another shape, and a bug that becomes a 500."""

    def concurrency(_: RolloutService) -> Any:
        return plan if plan is not None else 1 / 0

    monkeypatch.setattr(RolloutService, "concurrency", concurrency)
    outcome = fuzz("running", seed=SEED, examples=1, only="/v1/concurrency")
    assert any(check in finding for finding in outcome.findings)
