"""Routed experts of a sample that an update went through: of the weights that first computed each token. # P7."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embedded.helpers import MOE_CONFIG, served
from tests.weights.proofs import oracle
from tests.weights.proofs.scene import PROMPTS, VERSIONS, Scene, scene, versions
from tests.weights.proofs.test_modes import ABORT, DROP, KEEP

EXPERTS: dict[str, Any] = {"experts": {"enabled": True}}


async def read(at: Scene, groups: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Samples, and their rows."""
    at.engine.scheduler.open()
    batch = await at.made.service.lease_batch(VERSIONS, groups, 10.0)
    rows = {sample_id: handle.read() for sample_id, handle in batch.take_experts().items()}
    samples = [sample for group in batch.as_json()["groups"] for sample in group["samples"]]
    return [(sample, torch.from_numpy(rows[sample["sample_id"]].copy()).long()) for sample in samples]


@pytest.mark.parametrize("pause", [ABORT, DROP, KEEP], ids=["abort", "drop", "keep"])
async def test_rows_are_of_the_weights_that_their_span_names(tmp_path: Path, pause: dict[str, Any]) -> None:
    """Three versions in one sample: each row is the choice of its own version's router, under the cache it had."""
    serve = partial(served, tells_experts=True)
    async with scene(tmp_path, model="tiny-moe", serve=serve, **EXPERTS) as at:
        await at.begin(PROMPTS[1:])
        await at.engine.step(3)
        for version in (1, 2):
            await at.update(version, **pause)
            await at.engine.queued(2)
            await at.engine.step(3)
        for sample, rows in await read(at, 2):
            assert versions([sample]) == [[0, 1, 2]]
            assert rows.shape == (len(sample["prompt_ids"]) + len(sample["response_ids"]) - 1, 2, MOE_CONFIG.top_k)
            assert torch.equal(rows, oracle.routed(at.models, sample, kept=pause is KEEP))
            other = oracle.routed(dict.fromkeys(range(3), at.models[2]), sample, kept=False)
            assert not torch.equal(rows, other), "another version would have chosen others"
