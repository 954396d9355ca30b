"""Pauses of several services that are one to a trainer, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotNow
from tests.sharding.stage import DISK, staged, until
from tests.support.virtual import virtual


@virtual
async def test_a_pause_stops_every_shard_and_a_resume_opens_them() -> None:
    """P9: one ticket, one report with every shard's workers; nothing is open when it returns, all is after a resume."""
    async with staged() as (coordinator, one, other):
        assert one.open
        assert other.open
        report = (await coordinator.pause()).as_json()
        assert (report["ticket"], report["clean"]) == (1, True)
        assert set(report["workers"]) == {"s0.w0", "s1.w0"}
        assert not one.open
        assert not other.open
        assert (await coordinator.pause(mode="wait")).ticket == 1
        status = await coordinator.resume(ticket=1)
        assert status["state"] == "running"
        assert one.open
        assert other.open


@virtual
async def test_a_pause_returns_by_its_deadline_whatever_a_shard_does() -> None:
    """P8, P9: a silent shard is named, the report is in time and not clean; it is held when it speaks again."""
    async with staged() as (coordinator, one, other):
        other.silent = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        report = (await coordinator.pause(deadline_s=1.0)).as_json()
        assert loop.time() - began <= 1.1
        assert report["clean"] is False
        assert {row["worker"] for row in report["abandoned"]} == {"s1.w0"}
        other.speak()
        await until(lambda: other.paused and not coordinator.members.outside)
        assert not other.open
        await coordinator.resume()
        assert one.open
        assert other.open


@virtual
async def test_a_lost_shard_costs_a_pause_no_time() -> None:
    """P12: what is lost is said to be at once; the others are not waited for any longer than they need."""
    async with staged() as (coordinator, _, other):
        other.die()
        began = asyncio.get_running_loop().time()
        report = await coordinator.pause(deadline_s=1.0)
        assert asyncio.get_running_loop().time() - began < 0.5
        assert not report.clean


@virtual
async def test_a_shard_that_is_starting_again_stops_no_pause() -> None:
    """P8, P12, P24: while one shard loads its engines the others are paused, get weights, and go on; then it joins."""
    async with staged() as (coordinator, one, other):
        other.die()
        other.rise()
        other.refuses["pause"] = NotNow("starting", "engines are still loading: w0")
        report = (await coordinator.pause(deadline_s=1.0)).as_json()
        assert {row["worker"] for row in report["abandoned"]} == {"s1.w0"}
        assert not one.open
        await coordinator.update_weights(1, DISK)
        await coordinator.resume()
        assert (one.open, one.version, other.open) == (True, 1, False)
        other.refuses["pause"] = BadRequest("no engine here can be frozen")
        await coordinator.pause(mode="keep", deadline_s=1.0)
        await coordinator.resume()
        other.refuses.clear()
        await until(lambda: other.open and not coordinator.members.outside)
        assert other.version == 1


@virtual
async def test_pauses_join_and_late_ones_are_refused() -> None:
    """P11: a join has the same ticket and the earlier deadline; an old if_ticket, and an old ticket, are 409."""
    async with staged() as (coordinator, one, other):
        one.silent = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = asyncio.ensure_future(coordinator.pause(mode="wait", deadline_s=2.0, lanes=("train",)))
        await asyncio.sleep(0.1)
        second = await coordinator.pause(mode="abort", deadline_s=0.5, if_ticket=0)
        assert (await first) is second
        assert loop.time() - began < 0.75
        assert (second.ticket, second.mode) == (1, "abort")
        assert coordinator.pauses.closed == {"train", "eval"}
        assert other.calls.count("pause") >= 2
        one.speak()
        for refused in (coordinator.pause(if_ticket=0), coordinator.resume(ticket=0)):
            with pytest.raises(Conflict) as error:
                await refused
            assert error.value.type == "stale_ticket"
        await coordinator.resume()
        with pytest.raises(Conflict):
            await coordinator.pause(if_ticket=0)
        assert coordinator.state == "running"


@virtual
async def test_a_resume_waits_for_the_report_of_a_pause() -> None:
    """P11: resume during a pause waits for its report; a thousand flaps leave every shard open."""
    async with staged() as (coordinator, one, other):
        pausing = asyncio.ensure_future(coordinator.pause())
        await asyncio.sleep(0)
        await coordinator.resume()
        assert pausing.done()
        for _ in range(100):
            await coordinator.pause()
            await coordinator.resume()
        assert one.open
        assert other.open
        assert coordinator.pauses.ticket == 101


@virtual
async def test_what_one_shard_refuses_is_refused() -> None:
    """A pause that one shard's engines cannot do stops nobody."""
    async with staged() as (coordinator, one, other):
        other.refuses["pause"] = BadRequest("no engine here can be frozen")
        with pytest.raises(BadRequest):
            await coordinator.pause(mode="keep")
        other.refuses.clear()
        await until(lambda: one.open and other.open)
        assert coordinator.state == "running"
        for wrong in ({"deadline_s": 0}, {"lanes": ()}, {"mode": "x"}, {"mode": "keep", "lanes": ("train",)}):
            with pytest.raises(BadRequest):
                await coordinator.pause(**wrong)


@virtual
async def test_who_acknowledged_less_than_was_joined_is_named() -> None:
    """P9, P11: a shard that closed one lane, and never answers the join that wants both, has not acknowledged it."""
    async with staged() as (coordinator, one, other):
        one.delay_s = 0.3
        first = asyncio.ensure_future(coordinator.pause(mode="wait", lanes=("eval",), deadline_s=1.0))
        await asyncio.sleep(0.1)
        other.silent = True
        report = (await coordinator.pause(mode="abort", deadline_s=0.8)).as_json()
        assert (await first).as_json() == report
        assert report["clean"] is False
        assert {row["worker"] for row in report["abandoned"]} == {"s1.w0"}
        assert [member.shard_id for member in coordinator.members.outside] == ["s1"]


@virtual
async def test_a_join_that_asks_for_nothing_more_needs_no_second_answer() -> None:
    """P11: who has acknowledged all that was asked for is not named because the same was asked for again."""
    async with staged() as (coordinator, one, other):
        one.delay_s = 0.3
        first = asyncio.ensure_future(coordinator.pause(deadline_s=1.0))
        await asyncio.sleep(0.1)
        other.silent = True
        report = (await coordinator.pause(deadline_s=0.8)).as_json()
        assert (await first).as_json() == report
        assert not [row for row in report["abandoned"] if row["worker"] == "s1.w0"]


@virtual
async def test_a_pause_that_meets_one_being_undone_is_its_own() -> None:
    """P9: while a slow shard opens after a refused pause another pause begins; it stops everything, and is resumed."""
    async with staged(2) as (coordinator, quick, slow):
        slow.hush()
        slow.refuses["pause"] = BadRequest.at("mode", "no engine here can")
        first = asyncio.ensure_future(coordinator.pause())
        await until(lambda: quick.paused)
        await asyncio.sleep(0.05)
        quick.hush()
        slow.speak()
        await until(lambda: coordinator.pauses.state == "running")
        assert coordinator.pauses.climbing is not None
        slow.refuses.clear()
        second = asyncio.ensure_future(coordinator.pause())
        await asyncio.sleep(0.05)
        assert str(coordinator.state) == "pausing"
        quick.speak()
        with pytest.raises(BadRequest, match="no engine here can"):
            await first
        report = await second
        assert (report.clean, report.ticket) == (True, 2)
        assert (str(coordinator.state), coordinator.pauses.climbing) == ("paused", None)
        assert not any(shard.open for shard in (quick, slow))
        await coordinator.resume()
        assert coordinator.pauses.closed == frozenset()
        await until(lambda: quick.open and slow.open)
