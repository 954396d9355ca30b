"""An agent of two turns with a tool between them, and updates in each turn and during the tool. # P7 P10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.loops import TOOL_IDS, ToolUser
from tests.weights.proofs import oracle
from tests.weights.proofs.scene import LIMIT, TOLERANCE, drive, scene
from tests.weights.proofs.test_modes import ABORT, DROP, KEEP


@pytest.mark.parametrize("pause", [ABORT, DROP, KEEP], ids=["abort", "drop", "keep"])
async def test_each_turn_goes_over_updates_as_a_sample_of_one_does(tmp_path: Path, pause: dict[str, Any]) -> None:
    """Four versions in one sample: spans cover what the model made, and what it made is theirs."""
    async with scene(tmp_path, agent={"path": "tests.support.loops:ToolUser"}) as at:
        agent: ToolUser = at.made.agent
        await at.begin([[5, 6, 7]])
        await at.engine.step(3)
        await at.update(1, **pause)
        await at.engine.queued(1)
        await drive(at.engine, LIMIT)
        await at.made.until(lambda: agent.waiting == 1)
        await at.update(2, **pause)
        agent.go_on.set()
        await at.engine.queued(1)
        await at.engine.step(3)
        await at.update(3, **pause)
        [sample] = await at.finish(1)
        spans = [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]
        second = LIMIT + len(TOOL_IDS)
        assert spans == [(0, 0, 4), (1, 4, LIMIT), (2, second, second + 4), (3, second + 4, second + LIMIT)]
        # A turn is a request of its own: its prefix is computed anew, whatever was kept of the one before.
        anew = [second] if pause is KEEP else [4, second, second + 4]
        wanted = [
            logprob if mask else 0.0
            for logprob, mask in zip(oracle.replayed(at.models, sample, anew), sample["loss_mask"], strict=True)
        ]
        assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
