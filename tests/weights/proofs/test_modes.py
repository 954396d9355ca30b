"""An update in the middle of running requests, in each mode, by each way: every token is its version's. # P7 P25."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.weights.proofs import oracle
from tests.weights.proofs.scene import (
    DEADLINE_S,
    LIMIT,
    PROMPTS,
    Scene,
    assert_plain,
    assert_replayed,
    every_model,
    every_way,
    sampled,
    scene,
    versions,
)

ABORT: dict[str, Any] = {"mode": "abort"}
DROP: dict[str, Any] = {"mode": "keep", "kv": "drop"}
KEEP: dict[str, Any] = {"mode": "keep", "kv": "keep"}


async def twice(at: Scene, pause: dict[str, Any]) -> list[dict[str, Any]]:
    """Two updates while the same samples run, and their ends: two run and one waits its turn."""
    await at.begin()
    await at.engine.step(3)
    await at.update(1, **pause)
    await at.engine.queued(len(PROMPTS))
    await at.engine.step(4)
    await at.update(2, **pause)
    return await at.finish()


@every_way
@every_model
@pytest.mark.parametrize("pause", [ABORT, DROP], ids=["abort", "drop"])
async def test_what_is_computed_anew_is_all_of_the_new_weights(
    tmp_path: Path, way: str, model: str, pause: dict[str, Any]
) -> None:
    """Aborted and continued, or frozen without its cache: plain under the version of each span, also with three."""
    async with scene(tmp_path, model=model, way=way, max_running=2) as at:
        samples = await twice(at, pause)
        assert max(versions(samples), key=len) == [0, 1, 2]
        assert_plain(at, samples)


@every_way
@every_model
async def test_what_is_kept_is_read_as_it_was_made(tmp_path: Path, way: str, model: str) -> None:
    """Frozen with its cache: new weights attend to what old ones made, as a pass replayed with them does."""
    async with scene(tmp_path, model=model, way=way, max_running=2) as at:
        samples = await twice(at, KEEP)
        assert versions(samples)[:2] == [[0, 1, 2], [0, 1, 2]]
        assert_replayed(at, samples)
        long = samples[0]
        assert long["logprobs"] != pytest.approx(oracle.plain(at.models, long), abs=0.01), "the cache shows"


@every_way
@every_model
async def test_what_is_waited_for_is_all_of_the_old_weights(tmp_path: Path, way: str, model: str) -> None:
    """Nothing spans two versions: what ran ends under the old one, what came later is the new one's."""
    async with scene(tmp_path, model=model, way=way) as at:
        await at.begin(PROMPTS[:2])
        await at.engine.step(3)
        pausing = at.made.start(at.made.pause(DEADLINE_S, mode="wait"))
        await at.made.until(lambda: at.made.service.state == "pausing")
        at.engine.scheduler.permit(LIMIT)
        assert (await pausing).clean
        await at.hand_over(1)
        await at.made.resume(weight_version=1)
        await at.made.push([{"id": "later", "input_ids": PROMPTS[2]}])
        samples = await at.finish()
        assert sorted(versions(samples)) == [[0], [0], [1]]
        assert_plain(at, samples)


@pytest.mark.parametrize("pause", [ABORT, DROP, KEEP], ids=["abort", "drop", "keep"])
async def test_greedy_tokens_are_the_likeliest_of_their_version(tmp_path: Path, pause: dict[str, Any]) -> None:
    """At temperature 0 as at 1: the raw model's logprobs."""
    async with scene(tmp_path, **sampled(temperature=0.0)) as at:
        samples = await twice(at, pause)
        assert max(versions(samples), key=len) == [0, 1, 2]
        (assert_replayed if pause is KEEP else assert_plain)(at, samples)
