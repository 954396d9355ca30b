"""What histories have found, each as a scene of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.errors import Interrupted
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SampleStatus
from tests.simulation.life import Life
from tests.simulation.pausing import pause, resume
from tests.simulation.scene import play
from tests.simulation.world import World


async def _evaluation(life: Life) -> Any:
    """One request of lane eval."""
    prompt, sampling = Prompt("eval", "eval", [800, 7]), SamplingConfig(max_tokens=life.max_tokens)
    group = Group(group_id="e" * 32, prompt=prompt, size=1, lane="eval", ledger=Ledger())
    ask = life.parts.pool.generate
    return await life.call("eval", lambda: ask(group.samples[0], prompt, "eval", prompt.input_ids, 8, sampling))


def test_a_member_that_waits_for_a_parked_sibling_is_not_in_flight_after_a_pause() -> None:  # P10
    """After a clean pause what is in flight is parked; what waits for it goes on with it."""

    async def story(world: World, life: Life) -> None:
        def waiting() -> list[str]:
            return [
                sample.sample_id
                for run in life.parts.rollouts.runs(("train",))
                for sample in run.group.samples
                if sample.status is SampleStatus.GENERATED and any(m.parked for m in run.members.values())
            ]

        for _ in range(1000):
            if waiting():
                break
            await asyncio.sleep(0.005)
        assert waiting()
        report = await pause(life, mode="abort", deadline_s=2.0)
        assert report is not None
        assert report.clean
        assert life.parts.ledger.samples("in_flight") == len(report.parked) > 0
        await resume(life)
        await asyncio.sleep(10.0)
        assert life.parts.buffer.ready == life.parts.ledger.task("scene").admitted > 0

    play(story, agent="ToolUser", judge="GroupJudge")


def test_an_old_count_does_not_call_an_engine_idle() -> None:  # P9
    """The pause after one that abandoned requests does not repeat the 0 from before it."""

    async def story(world: World, life: Life) -> None:
        await pause(life, mode="abort", deadline_s=1.0)
        await resume(life)
        await asyncio.sleep(0.05)
        for engine in world.engines.values():
            engine.freeze()
        first = await pause(life, mode="abort", deadline_s=0.2)
        second = await pause(life, mode="abort", deadline_s=0.2)
        await resume(life)
        third = await pause(life, mode="abort", deadline_s=0.2)
        assert first is not None
        assert first.abandoned
        assert first is second
        assert third is not None
        assert [tally.residual for tally in third.workers.values()] == [None] * len(world.engines)

    play(story)


def test_lanes_that_join_late_are_ended_too() -> None:  # P9 P11
    """A join after the rung at which calls are cancelled has its own lane's calls cancelled all the same."""

    async def story(world: World, life: Life) -> None:
        world.faults.rates = {"agent_swallowing": 1.0}
        for _ in range(500):  # a loop that thinks keeps the climb below its last rung
            if world.faults.live:
                break
            await asyncio.sleep(0.01)
        for engine in world.engines.values():
            engine.freeze()
        held = world.spawn(_evaluation(life))
        await asyncio.sleep(0.01)
        assert life.parts.pool.in_flight["eval"] == 1
        first = world.spawn(pause(life, mode="abort", deadline_s=2.0, lanes=("train",)))
        await asyncio.sleep(1.2)
        assert life.parts.pool.in_flight["eval"] == 1
        second = await pause(life, mode="abort", deadline_s=0.2, lanes=("eval",))
        assert second is not None
        assert await first is second
        with pytest.raises(Interrupted):
            await held
        for tally in second.workers.values():
            assert tally.in_flight == tally.answered + tally.cancelled
        assert not life.parts.pool.in_flight["eval"]
        assert any(tally.abandoned for tally in second.workers.values())

    play(story, agent="Unruly")


def test_an_update_reaches_engines_that_restarted_without_a_label() -> None:  # P9 P24
    """A fleet that is out of traffic with unlabelled weights takes the next update from disk, and is back."""

    async def story(world: World, life: Life) -> None:
        engines = list(world.engines.values())
        await life.call("pause", lambda: life.service.pause(deadline_s=0.5))
        life.parts.fleet.became(3, None)  # as a service finds it that is younger than its engines
        for engine in engines:
            engine.crash()
            engine.come_back(0)
            engine.label = "default"
        for worker in life.parts.pool.workers.values():
            worker.doubt()
        await asyncio.sleep(5.0)
        assert not life.parts.pool.active
        record = await life.call("update", lambda: life.service.update_weights(4, {"kind": "disk", "path": "/w/v4"}))
        assert all(outcome["ok"] for outcome in record["workers"].values())
        await resume(life)
        await asyncio.sleep(20.0)
        assert len(life.parts.pool.active) == len(engines)

    play(story)


def test_a_worker_that_goes_on_after_the_ladder_began_is_aborted_all_the_same() -> None:  # P9
    """A thaw that comes through late, in the round of a wait, is not the end of its worker's drain."""

    async def story(world: World, life: Life) -> None:
        for engine in world.engines.values():
            engine.set_slowness(5.0)
        await asyncio.sleep(0.2)
        await pause(life, mode="keep", deadline_s=2.0)
        assert any(engine.count() for engine in world.engines.values())
        for engine in world.engines.values():
            engine.freeze()
            world.later(1.2, engine.thaw)  # the ladder starts after 1.0 s, and cancels calls after 1.5 s
        report = await pause(life, mode="wait", deadline_s=2.0)
        assert report is not None
        assert report.clean
        assert "abort" in [rung.name for rung in report.rungs]
        assert "http" not in [rung.name for rung in report.rungs]

    play(story)


def test_a_time_limit_stands_still_until_the_engine_is_known_to_go_on() -> None:  # P10
    """What was frozen nearly as long as its time limit has time left when its thaw takes a while."""

    async def story(world: World, life: Life) -> None:
        for engine in world.engines.values():
            engine.set_slowness(5.0)
        await asyncio.sleep(0.2)
        await pause(life, mode="keep", deadline_s=2.0)
        frozen = [worker for worker in life.parts.pool.workers.values() if worker.frozen and worker.calls]
        assert frozen
        await asyncio.sleep(life.config.request_timeout_s - 1.0)
        for engine in world.engines.values():
            engine.freeze()
            world.later(2.0, engine.thaw)
        await resume(life)
        await asyncio.sleep(10.0)
        assert not life.parts.rollouts._tools.tally.failed

    play(story)


def test_no_count_is_believed_under_a_freeze_of_a_service_that_died() -> None:  # P9
    """A freeze that arrives late, and is nobody's here, holds requests at a door that no count names."""

    async def story(world: World, life: Life) -> None:
        for engine in world.engines.values():
            engine.pause("in_place")
        for _ in range(1000):
            if any(engine.door for engine in world.engines.values()):
                break
            await asyncio.sleep(0.01)
        assert any(engine.door for engine in world.engines.values())
        world.faults.rates = {"abort_ignored": 1.0}
        report = await pause(life, mode="abort", deadline_s=1.0)
        world.faults.rates = {}
        assert report is not None
        assert report.abandoned
        for _ in range(200):
            await asyncio.sleep(0.05)
            for worker in life.parts.pool.workers.values():
                assert worker.residual != 0 or not world.engines[worker.endpoint.url].door

    play(story)


def test_what_is_frozen_stays_so_from_the_moment_an_update_begins() -> None:  # P24
    """A stronger pause that joins while the update still asks who else needs the weights thaws nobody."""

    async def story(world: World, life: Life) -> None:
        first, *others = world.engines.values()
        first.crash()
        first.come_back(0)
        first.label = "7"
        for worker in life.parts.pool.workers.values():
            worker.doubt()
        await asyncio.sleep(1.0)
        for engine in others:
            engine.set_slowness(5.0)
        await asyncio.sleep(0.2)
        assert any(worker.quarantine is not None for worker in life.parts.pool.workers.values())
        await pause(life, mode="keep", deadline_s=2.0)
        assert any(worker.frozen and worker.calls for worker in life.parts.pool.workers.values())
        source = {"kind": "disk", "path": "/w/v1"}
        update = world.spawn(life.call("update", lambda: life.service.update_weights(1, source)))
        await asyncio.sleep(0.003)  # it asks the quarantined one for its label
        stronger = world.spawn(pause(life, mode="wait", deadline_s=4.0))
        await update
        assert await stronger is not None

    play(story)
