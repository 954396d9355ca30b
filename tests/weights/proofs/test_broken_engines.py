"""The proofs bite: an engine that says one thing and does another is caught by the check that the others pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.embedded.model import write_weights
from rollout_svc.embedded.updating import Updating
from tests.weights.proofs.scene import PROMPTS, Scene, assert_plain, assert_replayed, scene, versions
from tests.weights.proofs.test_modes import ABORT, DROP, KEEP

Break = Callable[[pytest.MonkeyPatch, Scene], Awaitable[None]]


async def unsaid(_: pytest.MonkeyPatch, at: Scene) -> None:
    """Other weights in the middle of a version."""
    model = at.engine.scheduler.model
    await at.engine.engine.thread.call(lambda: write_weights(model, dict(at.models[3].state_dict())))


async def unmoved(patch: pytest.MonkeyPatch, _: Scene) -> None:
    """A new label, and the old weights."""

    def finish(self: Updating, _: str | None = None) -> bool:
        self.abandon()
        return True

    patch.setattr(Updating, "finish", finish)


async def unfinished(patch: pytest.MonkeyPatch, at: Scene) -> None:
    """All tensors of the new version but one."""
    updating = at.engine.engine._updating
    finish, name = updating.finish, "blocks.1.qkv.weight"

    def all_but_one(update: str | None = None) -> bool:
        updating._spare[name].copy_(updating._wanted[name].data)
        return finish(update)

    patch.setattr(updating, "finish", all_but_one)


async def early(patch: pytest.MonkeyPatch, at: Scene) -> None:
    """Spans that begin one token before the weights do."""
    scheduler = at.engine.scheduler
    relabel = scheduler.relabel

    def before(version: str) -> None:
        relabel(version)
        for job in scheduler.batch.jobs:
            job.marks[-1] = (version, len(job.ids) - 1)

    patch.setattr(scheduler, "relabel", before)


async def kept(patch: pytest.MonkeyPatch, at: Scene) -> None:
    """The cache is kept whatever was asked for."""
    patch.setattr(at.engine.scheduler, "retract", at.engine.scheduler.freeze)


async def dropped(patch: pytest.MonkeyPatch, at: Scene) -> None:
    """The cache is dropped whatever was asked for."""
    scheduler = at.engine.scheduler
    freeze = scheduler.freeze

    def drop() -> None:
        freeze()
        jobs = list(scheduler.batch.jobs)
        scheduler.batch.remove(list(range(len(jobs))))
        scheduler.waiting.extendleft(reversed(jobs))

    patch.setattr(scheduler, "freeze", drop)


@pytest.mark.parametrize(
    ("wrong", "pause", "way"),
    [
        *((wrong, pause, "shm") for wrong in (unsaid, unmoved, unfinished) for pause in (ABORT, DROP, KEEP)),
        (early, KEEP, "shm"),
        (kept, DROP, "disk"),  # by other ways the cache is flushed by a call of its own, which it refuses
        (dropped, KEEP, "shm"),
    ],
)
async def test_it_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Break, pause: dict[str, Any], way: str
) -> None:
    """Whole, it passes the check of its mode; broken, it fails it."""
    check = assert_replayed if pause is KEEP else assert_plain
    assert await passes(tmp_path, way, check, pause, None)
    assert not await passes(tmp_path, way, check, pause, lambda at: wrong(monkeypatch, at))


async def passes(
    folder: Path,
    way: str,
    check: Callable[[Scene, Sequence[dict[str, Any]]], None],
    pause: dict[str, Any],
    breaking: Callable[[Scene], Awaitable[None]] | None,
) -> bool:
    """Whether an update in the middle of two requests passes; its spans say what they should in any case."""
    async with scene(folder, way=way) as at:
        await at.begin(PROMPTS[1:])
        await at.engine.step(3)
        if breaking is not None:
            await breaking(at)
        await at.engine.step(2)
        await at.update(1, **pause)
        samples = await at.finish(2)
        assert versions(samples) == [[0, 1], [0, 1]]
        try:
            check(at, samples)
        except AssertionError:
            return False
        return True
