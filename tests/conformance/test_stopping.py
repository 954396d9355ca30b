"""Every promise of stopping, against every engine: what a trainer may rely on, whoever generates.

- Each test is one promise and asks nothing of the engine that only a fake could tell, unless it says so.
- What holds for all of them is checked at every pause by `Scene.stopped`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import BadRequest, Conflict
from rollout_svc.workers.worker import WorkerState
from tests.conformance.scene import scene
from tests.conformance.site import Site
from tests.support.fake_sglang import FakeSGLang

FLAPS: Final = 20
PROMPT_S: Final = 1.0
"""An abort that engines obey ends a pause within this, at the pace of a fake, whatever its deadline."""


# -- abort ---------------------------------------------------------------------------------------------------


async def test_aborting_under_load(site: Site) -> None:
    """Full, queue included, the engine is idle at once by its own count, and the report says so or cannot."""  # P8 P9
    async with scene(site) as on:
        await on.full()
        report = await on.pause()
        await on.stopped(report)
        assert report.workers["w0"].in_flight == on.load
        assert report.elapsed_s < PROMPT_S * site.pace  # P16
        assert (on.made.samples("aborted"), on.made.groups("aborted")) == (on.load, on.load)


async def test_what_was_cut_goes_on(site: Site) -> None:
    """Prompt and received tokens go back, and are continued from: no token is lost, none is too much."""  # P6 P10
    async with scene(site) as on:
        await on.full()
        await on.pause()
        kept = on.kept()
        assert len(kept) == on.load
        await on.made.resume()
        records = await on.whole()
        for prompt_id, ids in kept.items():
            assert records[prompt_id]["response_ids"][: len(ids)] == ids


async def test_what_was_queued_goes_on(site: Site) -> None:
    """Requests that never had a slot are aborted as well, with no token, and start anew after resume."""  # P9 P10
    async with scene(site) as on:
        await on.full()
        await on.stopped(await on.pause())
        assert sum(not ids for ids in on.kept().values()) >= 1
        await on.made.resume()
        await on.whole()


async def test_late_arrivals_are_caught(site: Site) -> None:
    """Requests that the engine takes off the wire after the abort are aborted by the next one."""  # P9 P16
    async with scene(site) as on:
        site.hold_door()
        await on.made.push(on.load)
        await on.until(lambda: len(on.made.worker().calls) == on.load)
        pausing = on.made.start(on.pause())
        await on.until(lambda: on.aborts >= 1)
        site.heal()
        await on.stopped(await pausing)
        await on.made.resume()
        await on.whole()


async def test_pausing_at_any_moment(site: Site) -> None:
    """Paused in the moment requests leave, wherever they are by then, nothing runs afterwards."""  # P9
    async with scene(site) as on:
        await on.made.push(on.load)
        for _ in range(5):
            await on.until(lambda: bool(on.made.worker().calls))
            await on.stopped(await on.pause())
            await on.made.resume()
        await on.whole()


async def test_aborting_again_ends_with_the_pause(site: Site) -> None:
    """No abort is sent once the report is out: what runs after resume is never met by an old one."""  # P17
    async with scene(site) as on:
        await on.full()
        await on.pause()
        sent = on.aborts
        assert 1 <= sent <= 2 * on.load
        await on.made.resume()
        await site.wait_inside(on.load)
        await on.whole()
        assert on.aborts == sent


async def test_flaps_leave_nothing(site: Site) -> None:
    """Twenty pauses under load: each clean, no task more, and every sample grows until it is whole."""  # P11
    async with scene(site) as on:
        await on.full()
        before = len(asyncio.all_tasks())
        longest: dict[str, list[int]] = {}
        for _ in range(FLAPS):
            await on.until(lambda: bool(on.made.worker().calls) or on.made.groups("ready") == on.load)
            await on.stopped(await on.pause())
            kept = on.kept()
            assert len(kept) == on.load
            for prompt_id, ids in longest.items():
                assert kept[prompt_id][: len(ids)] == ids
            longest = kept
            assert len(asyncio.all_tasks()) <= before
            await on.made.resume()
        assert any(longest.values())
        await on.whole()


async def test_tickets_hold_over_an_engine_at_work(site: Site) -> None:
    """A joined pause is one; a resume waits for its report; one with an old ticket is refused."""  # P11
    async with scene(site) as on:
        await on.full()
        first = on.made.start(on.pause())
        joined = await on.pause()
        assert (await first) is joined
        await on.stopped(joined)
        await on.made.resume(ticket=joined.ticket)
        await on.until(lambda: bool(on.made.worker().calls))
        with pytest.raises(Conflict):
            await on.pause(if_ticket=joined.ticket - 1)
        assert on.made.service.state == "running"
        pausing = on.made.start(on.pause())
        await on.until(lambda: on.made.service.state == "pausing" or pausing.done())
        await on.made.resume()
        assert pausing.done()
        await on.whole()


async def test_a_judge_observes_a_pause(site: Site) -> None:
    """A judge under way is cancelled; the answer is kept and judged after resume, without generation."""  # P13
    async with scene(site) as on:
        judge = on.made.judge
        judge.hold = True
        await on.full()
        site.finish()
        await on.until(lambda: judge.held == on.load)
        await on.stopped(await on.pause(3.0))  # judges are cancelled after a tenth of it
        assert len(judge.cancelled) == on.load
        assert {len(ids) for ids in on.kept().values()} == {site.sampling["max_tokens"]}
        judge.release()
        await on.made.resume()
        await on.whole()
        assert on.aborts == 0  # the engine had nothing left to stop


async def test_a_pause_whose_caller_leaves_goes_on(site: Site) -> None:
    """Cancelling the call propagates; what it began ends all the same, and the engine is idle."""  # P14
    async with scene(site) as on:
        await on.full()
        pausing = on.made.start(on.made.service.pause(deadline_s=10.0))
        await on.until(lambda: on.made.service.state == "pausing")
        pausing.cancel()
        await asyncio.wait({pausing})
        assert pausing.cancelled()
        await on.stopped(await on.pause())
        await on.made.resume()
        await on.whole()


# -- wait and keep -------------------------------------------------------------------------------------------


async def test_waiting_lets_what_runs_finish(site: Site) -> None:
    """In `wait` what was sent ends by itself and counts: nothing is aborted, nothing starts."""  # P9
    async with scene(site) as on:
        await on.full()
        pausing = on.made.start(on.pause(60.0, mode="wait"))
        await on.until(lambda: on.made.service.state == "pausing")
        site.finish()
        report = await pausing
        await on.stopped(report)
        assert (report.workers["w0"].answered, report.workers["w0"].late, on.aborts) == (on.load, 0, 0)
        assert on.made.groups("ready") == on.load


async def test_waiting_ends_at_half_of_the_time(site: Site) -> None:
    """What has not ended by then is aborted, kept and continued."""  # P3 P8
    async with scene(site) as on:
        await on.full()
        report = await on.pause(0.4, mode="wait")
        await on.stopped(report)
        assert on.aborts >= 1
        assert "abort" in [rung.name for rung in report.rungs]
        await on.made.resume()
        await on.whole()


@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_keeping_freezes_or_is_refused_by_name(site: Site, kv: str) -> None:
    """Engines that can hold what they run, and go on with it; of the others it is said who cannot, and nothing ends."""
    async with scene(site) as on:
        await on.full()
        if f"freeze_{kv}_kv" not in site.capabilities:
            with pytest.raises(BadRequest, match="w0"):
                await on.pause(mode="keep", kv=kv)
            assert on.made.service.state == "running"
            assert len(on.made.worker().calls) == on.load
            await on.whole()
            return
        report = await on.pause(mode="keep", kv=kv)
        assert (report.clean, on.made.worker().frozen) == (True, True)
        tally = report.workers["w0"]
        assert (tally.in_flight, tally.cancelled) == (on.load, 0)
        assert on.made.samples("in_flight") == on.load - tally.answered
        await on.made.resume()
        await on.whole()
        assert on.aborts == 0


async def test_an_abort_over_a_freeze_takes_effect(site: Site) -> None:
    """Frozen requests are aborted all the same, with their tokens, and the engine is idle."""  # P9 P10
    async with scene(site) as on:
        await on.full()
        await on.pause(mode="keep")
        report = await on.pause()
        assert report.clean
        assert await site.own_count() == 0
        assert len(on.kept()) == on.load
        await on.made.resume()
        await on.whole()


# -- lanes ---------------------------------------------------------------------------------------------------


async def test_a_lane_is_stopped_by_id(site: Site) -> None:
    """Training stops, an evaluation on the same engine runs on, another starts, and both are whole."""  # P15
    half = site.slots // 2
    async with scene(site, trainer={"train_batch_size": half}) as on:
        first = on.made.start(on.made.evaluate(half))
        await on.made.push(half)
        await site.wait_inside(site.slots)
        report = await on.pause(lanes=("train",))
        assert report.clean
        assert (report.workers["w0"].in_flight, on.made.samples("aborted")) == (half, half)
        assert not first.done()
        second = on.made.start(on.made.evaluate(1))
        site.finish()
        on.whole_evaluation([*await first, *await second], half + 1)
        await on.made.resume()
        await on.whole(half)


async def test_both_lanes_stop_and_go_on(site: Site) -> None:
    """One pause for both: the engine is idle, and after resume both go on from what they had."""  # P6 P9 P10
    half = site.slots // 2
    async with scene(site, trainer={"train_batch_size": half}) as on:
        evaluating = on.made.start(on.made.evaluate(half))
        await on.made.push(half)
        await site.wait_inside(site.slots)
        report = await on.made.pause(10.0)
        await on.stopped(report)
        assert report.workers["w0"].in_flight == 2 * half
        assert on.made.parts.evaluations.ledger.samples("aborted") == half
        await on.made.resume()
        site.finish()
        on.whole_evaluation(await evaluating, half)
        await on.whole(half)


async def test_an_evaluation_whose_caller_leaves_is_stopped(site: Site) -> None:
    """Its requests are aborted while training's run on: in the end the engine has theirs only, and they are whole."""
    half = site.slots // 2
    async with scene(site, trainer={"train_batch_size": half}) as on:
        evaluating = on.made.start(on.made.evaluate(half))
        await on.made.push(half)
        await site.wait_inside(site.slots)
        evaluating.cancel()
        await asyncio.wait({evaluating})
        assert evaluating.cancelled()  # P14
        await on.made.until(lambda: on.aborts >= half)
        assert on.made.parts.pool.in_flight == {"train": half, "eval": 0}
        await on.whole(half)


# -- engines that do not obey --------------------------------------------------------------------------------


async def test_a_silent_engine_costs_the_deadline_and_no_more(site: Site) -> None:
    """Nothing answers: the pause is back in time and names what it left; nothing received is lost."""  # P8 P9 P10
    async with scene(site) as on:
        await on.full()
        site.hang()
        report = await on.pause(1.0)
        assert not report.clean
        assert {left.worker for left in report.abandoned} == {"w0"}
        assert len(report.abandoned) == report.workers["w0"].abandoned == on.load
        assert on.made.worker().state in (WorkerState.QUARANTINED, WorkerState.DEAD)
        assert on.made.samples("aborted") == on.load
        site.heal()
        site.finish()
        await on.made.resume()
        await on.until(lambda: on.made.worker().state is WorkerState.ACTIVE)  # P9: there is always a way back
        await on.whole()


async def test_lost_aborts_are_named(site: Site) -> None:
    """An engine that takes aborts and does nothing: calls are cancelled, what still runs is named or gone."""  # P8 P9
    async with scene(site) as on:
        await on.full()
        site.lose_aborts()
        report = await on.pause(1.0)
        assert on.aborts >= 2
        tally = report.workers["w0"]
        assert tally.cancelled == on.load
        assert len(report.abandoned) == (0 if report.clean else on.load)
        assert on.made.samples("aborted") == on.load


async def test_one_silent_engine_does_not_hold_up_another(site: Site) -> None:
    """Of two workers one answers nothing: the other is idle long before the deadline."""
    async with FakeSGLang(weight_version="0", **site.kin) as other, scene(site) as on:
        other.listeners.append(on.made.bell.ring)
        await on.made.service.add_worker(WorkerConfig(url=other.url, dialect="sglang", max_batch=on.load))
        await on.until(lambda: on.made.worker(1).state is WorkerState.ACTIVE)
        await on.made.push(on.load)
        await on.until(lambda: other.running == on.load // 2 == len(on.made.worker().calls))
        await site.wait_inside(on.load // 2)
        site.hang()
        pausing = on.made.start(on.pause(1.0))
        await other.wait_idle()  # P12
        assert not pausing.done()
        report = await pausing
        assert (report.clean, report.workers["w1"].answered) == (False, on.load // 2)
        assert {left.worker for left in report.abandoned} == {"w0"}


async def test_killed_under_load_it_comes_back(site: Site) -> None:
    """What a killed engine held goes on when it is back, as another incarnation, with nothing failed or lost."""  # P19
    async with scene(site) as on:
        await on.full()
        await on.pause()
        kept = on.kept()
        await on.made.resume()
        await site.wait_inside(on.load)
        await site.kill()
        await on.until(lambda: on.made.worker().state is not WorkerState.ACTIVE)
        await site.restart()
        records = await on.whole()
        for prompt_id, ids in kept.items():
            assert records[prompt_id]["response_ids"][: len(ids)] == ids
        assert on.made.worker().incarnation == 2


async def test_killed_during_a_pause(site: Site) -> None:
    """An engine that dies while it is stopped has nothing left running: the pause ends, and no token is lost."""  # P8
    async with scene(site) as on:
        await on.full()
        site.hang()
        pausing = on.made.start(on.pause(3.0))
        await on.until(lambda: on.aborts >= 1)
        await site.kill()
        report = await pausing
        assert report.workers["w0"].in_flight == on.load
        assert (on.made.samples("aborted"), on.made.samples("in_flight")) == (on.load, 0)
