"""Nothing that was computed under old weights is read under new ones, by an engine that remembers prefixes. # P25."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.weights.proofs.remembering import RememberingBatch, remembering
from tests.weights.proofs.scene import PROMPTS, Scene, assert_plain, every_model, every_way, scene, versions
from tests.weights.proofs.test_modes import ABORT, DROP, KEEP


def hits(at: Scene) -> int:
    """Tokens that the engine has read from its cache."""
    batch = at.engine.scheduler.batch
    assert isinstance(batch, RememberingBatch)
    return batch.hits


async def ask(at: Scene, name: str) -> list[dict[str, Any]]:
    """Have the long prompt answered once more."""
    await at.made.push([{"id": name, "input_ids": PROMPTS[2]}])
    return await at.finish(1)


async def asked_before_and_after(at: Scene) -> list[dict[str, Any]]:
    """The same prompt twice under old weights, and under new ones."""
    first = await ask(at, "first")
    assert hits(at) == 0
    assert_plain(at, await ask(at, "second"))
    assert hits(at) == len(PROMPTS[2]) - 1, "what was computed for the first is read for the second"
    await at.update(1)
    again = await ask(at, "again")
    assert versions([*first, *again]) == [[0], [1]]
    return again


@every_way
@every_model
async def test_a_prompt_asked_again_is_computed_by_the_new_weights(tmp_path: Path, way: str, model: str) -> None:
    """The service has the cache dropped at the update: what follows is plain under the new version."""
    async with scene(tmp_path, model=model, way=way, serve=remembering) as at:
        before = len(PROMPTS[2]) - 1
        assert_plain(at, await asked_before_and_after(at))
        assert hits(at) == before


@every_way
async def test_a_cache_that_outlives_an_update_is_caught(tmp_path: Path, way: str) -> None:
    """The same check fails for an engine that says it has forgotten, and has not."""
    async with scene(tmp_path, way=way, serve=partial(remembering, deaf=True)) as at:
        again = await asked_before_and_after(at)
        with pytest.raises(AssertionError):
            assert_plain(at, again)


@every_way
@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("pause", [ABORT, DROP], ids=["abort", "drop"])
async def test_a_continuation_does_not_read_what_its_own_first_part_left(
    tmp_path: Path, way: str, pause: dict[str, Any], deaf: bool
) -> None:
    """Cut in the middle, its prefix is in the cache: computed anew, unless the engine does not forget."""
    async with scene(tmp_path, way=way, serve=partial(remembering, deaf=deaf)) as at:
        await at.begin(PROMPTS[2:])
        await at.engine.step(4)
        await at.update(1, **pause)
        samples = await at.finish(1)
        assert versions(samples) == [[0, 1]]
        with pytest.raises(AssertionError) if deaf else nullcontext():
            assert_plain(at, samples)


@every_way
async def test_keep_keeps_the_cache_only_of_engines_that_hold_a_request(tmp_path: Path, way: str) -> None:
    """Nothing was frozen, so nothing was to be kept: what is asked again is computed by the new weights."""
    async with scene(tmp_path, way=way, serve=remembering) as at:
        await ask(at, "first")
        await at.update(1, **KEEP)
        assert_plain(at, await ask(at, "again"))
        assert hits(at) == 0
