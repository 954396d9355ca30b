"""Updates at any moment of many requests, one after the other, by each way and in each mode. # P6 P7 P24 P25.

A seed is a schedule: engines, prompts, and at how many steps which update comes. `PROOF_SEEDS=0:1000`, as `make proofs`
sets it, runs many; a failure names its seed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from rollout_svc.errors import Conflict
from rollout_svc.workers.worker import Worker, WorkerState
from tests.embedded.helpers import PATIENCE_S
from tests.weights.proofs.scene import (
    CONFIGS,
    DEADLINE_S,
    LIMIT,
    VERSIONS,
    WAYS,
    Scene,
    assert_plain,
    assert_replayed,
    drive,
    sampled,
    scene,
    versions,
)
from tests.weights.proofs.test_modes import ABORT, DROP, KEEP

FIRST, END = map(int, os.environ.get("PROOF_SEEDS", "0:5").split(":"))
LENGTHS: Final = (1, 2, 31, 32, 33, 64, 200)
STEPS: Final = (0, 0, 1, 1, 2, 3, 5, LIMIT - 2, LIMIT - 1, LIMIT)
"""Of an engine, before an update: none, as many as leave one token, and as many as leave none."""

SETTLED: Final = 0.7
"""How often an update comes only once every request is at an engine; else some are on their way."""


@pytest.mark.parametrize("seed", range(FIRST, END))
async def test_every_token_is_as_its_span_says_after_any_schedule(tmp_path: Path, seed: int) -> None:
    """Whatever was cut, frozen, retracted or queued: the logprobs are those of the weights and the cache it had."""
    rng = Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.choice(LENGTHS))] for _ in range(rng.randint(1, 5))]
    members = rng.choice([1, 1, 3])
    settings = sampled(temperature=rng.choice([0.0, 1.0]), members=members)
    made = scene(
        tmp_path,
        model=rng.choice(list(CONFIGS)),
        way=rng.choice(list(WAYS)),
        engines=rng.choice([1, 1, 2]),
        max_running=rng.choice([1, 2, 3, 16]),
        worker={"stream": rng.choice([False, True])},
        **settings,
    )
    async with made as at:
        await at.push(prompts)
        pauses: dict[int, Mapping[str, Any]] = {}
        for version in range(1, rng.randint(2, VERSIONS)):
            if rng.random() < SETTLED:
                await at.settled(len(prompts) * members)
            for engine in at.engines:
                await drive(engine, rng.choice(STEPS))
            pauses[version] = await update(at, version, rng)
        samples = await at.finish(len(prompts))
        assert len(samples) == len(prompts) * members
        for sample in samples:
            assert len(sample["response_ids"]) == LIMIT
            assert_replayed(at, [sample], computed_anew(sample, pauses))


async def update(at: Scene, version: int, rng: Random) -> dict[str, Any]:
    """Update in some mode: in one call or three, after one that is refused, or after a stronger pause has joined."""
    pause = rng.choice([ABORT, DROP, KEEP, KEEP])
    if at.way != "external" and rng.random() < 0.3:
        await at.hand_over(version, pause={"deadline_s": DEADLINE_S, **pause})
        return pause
    assert (await at.made.pause(DEADLINE_S, **pause)).clean
    if rng.random() < 0.2:
        await at.fail(version)
    if rng.random() < 0.2:
        pause = ABORT
        assert (await at.made.pause(DEADLINE_S, **pause)).clean
    await at.hand_over(version)
    await at.made.resume(weight_version=version)
    return pause


def computed_anew(sample: Mapping[str, Any], pauses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Before which of its tokens a sample's cache was made anew: where an update came that did not keep it."""
    found, last = [], 0
    for span in sample["weight_versions"]:
        if any(pauses[version] is not KEEP for version in range(last + 1, span["version"] + 1)):
            found.append(span["start"])
        last = span["version"]
    return found


async def test_more_prompts_than_are_taken_in_at_one_step(tmp_path: Path) -> None:
    """An update between two parts of the prompts' intake: who was in has both versions, who was not has the new one."""
    prompts = [[place] * 230 for place in range(10)]
    async with scene(tmp_path, max_running=16) as at:
        await at.begin(prompts)
        await at.engine.step(1)
        assert len(at.engine.scheduler.batch.jobs) == 8, "a step takes 2,048 tokens in"
        await at.update(1, **KEEP)
        samples = await at.finish(len(prompts))
        assert sorted(versions(samples)) == 8 * [[0, 1]] + 2 * [[1]]
        assert_replayed(at, samples)


@pytest.mark.parametrize("pause", [ABORT, DROP, KEEP], ids=["abort", "drop", "keep"])
async def test_an_evaluation_is_of_one_version_and_training_beside_it_goes_on(
    tmp_path: Path, pause: dict[str, Any]
) -> None:
    """Both lanes run while the weights change: the evaluation says so and ends, the sample has both versions."""
    async with scene(tmp_path) as at:
        evaluating = at.made.start(at.made.evaluate([{"id": "e", "input_ids": [9, 8, 7]}]))
        await at.begin([[1, 2, 3]], samples=2)
        await at.engine.step(4)
        await at.update(1, **pause)
        with pytest.raises(Conflict, match="the weights moved from version 0 to 1"):
            await evaluating
        samples = await at.finish(1)
        assert versions(samples) == [[0, 1]]
        assert_replayed(at, samples, computed_anew(samples[0], {1: pause}))


@pytest.mark.parametrize(("way", "stream"), [("disk", False), ("external", False), ("shm", True)])
async def test_who_was_left_out_of_an_update_makes_no_token_until_it_has_the_weights(
    tmp_path: Path, way: str, stream: bool
) -> None:
    """A stuck engine is skipped; what it still says counts for nothing, and later tokens are the fleet's version's."""
    async with scene(tmp_path, way=way, engines=2, worker={"stream": stream}) as at:
        await at.push([[place, 1, 2] for place in range(4)])
        await at.settled(4)
        for engine in at.engines:
            await engine.step(3)
        stuck, held = at.engines[1], threading.Event()
        assert len(stuck.scheduler.batch.jobs) == 2
        stuck.engine.thread.post(lambda: held.wait(PATIENCE_S))
        report = await at.made.pause(0.5, mode="abort")
        assert {one.worker for one in report.abandoned} == {"w1"}
        await at.hand_over(1, only=[at.engine])
        assert at.made.worker(1).state is WorkerState.QUARANTINED
        await at.made.resume(weight_version=1)
        at.engine.scheduler.open()
        samples = await at.finish(4)
        held.set()
        assert {tuple(found) for found in versions(samples)} <= {(0, 1), (1,)}
        assert_plain(at, samples)
        await stuck.until(lambda: is_idle(at.made.worker(1)))
        await at.update(2, mode="abort")
        await at.made.until(lambda: at.made.worker(1).state is WorkerState.ACTIVE)
        await at.push([[place, 1, 2] for place in range(6)], "later")
        later = await at.finish(6)
        assert versions(later) == [[2]] * 6
        assert_plain(at, later)


def is_idle(worker: Worker) -> bool:
    """Whether its engine was seen to have let everything go: it is in traffic, or out for its version alone."""
    return worker.quarantine is None or worker.quarantine.kind == "version"
