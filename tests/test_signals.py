"""Awaiting the gate: no change is missed, and nobody who leaves leaves anything behind."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.gate import LANES, Gate
from rollout_svc.signals import GateSignals
from tests.support.virtual import soon, virtual


@virtual
async def test_an_open_lane_is_not_waited_for() -> None:
    """Whoever finds the lane open goes on at once."""
    signals = GateSignals(Gate())
    await signals.wait_open("train")
    assert asyncio.get_running_loop().time() == 0


@virtual
async def test_opening_wakes_the_waiters_of_that_lane_alone() -> None:
    """A waiter of one lane sleeps through whatever happens to the other."""  # P15
    gate = Gate(is_open=False)
    signals = GateSignals(gate)
    train, evals = (asyncio.create_task(signals.wait_open(lane)) for lane in LANES)
    await soon()
    gate.open(["eval"])
    await soon()
    assert (train.done(), evals.done()) == (False, True)
    gate.open(["train"])
    await train


@virtual
async def test_a_flap_does_not_let_a_waiter_through() -> None:
    """A lane that opened and closed again before the waiter ran is closed: the state counts, not the pulse."""  # P11
    gate = Gate(is_open=False)
    signals = GateSignals(gate)
    waiter = asyncio.create_task(signals.wait_open("train"))
    await soon()
    gate.open(["train"])
    gate.close(["train"], "abort")
    await soon()
    assert not waiter.done()
    gate.open(["train"])
    await waiter


@given(seconds=st.floats(0, 100))
@virtual
async def test_a_sleep_in_an_open_lane_takes_its_time(seconds: float) -> None:
    """With the lane open throughout, the whole time passes."""
    signals = GateSignals(Gate())
    assert await signals.sleep_while_open("train", seconds)
    assert asyncio.get_running_loop().time() == pytest.approx(seconds, abs=1e-6)
    assert not signals._waiting


@virtual
async def test_closing_ends_a_sleep_at_once() -> None:
    """A back-off wakes when its lane closes, and not when the other one does."""  # P20
    gate = Gate()
    signals = GateSignals(gate)
    sleep = asyncio.create_task(signals.sleep_while_open("train", 100))
    loop = asyncio.get_running_loop()
    loop.call_later(4, lambda: gate.close(["eval"], "abort"))
    loop.call_later(5, lambda: gate.close(["train"], "keep"))
    assert not await sleep
    assert loop.time() == pytest.approx(5)


@virtual
async def test_a_sleep_does_not_begin_in_a_closed_lane() -> None:
    """Closed is a state: whoever comes later sees it too."""
    signals = GateSignals(Gate(is_open=False))
    assert not await signals.sleep_while_open("train", 100)
    assert asyncio.get_running_loop().time() == 0


@pytest.mark.parametrize("waits", ["open", "sleep"])
def test_a_cancelled_waiter_leaves_nothing(waits: str) -> None:
    """Cancellation propagates, and neither a waiter nor a timer stays."""  # P14

    @virtual
    async def run() -> None:
        gate = Gate(is_open=waits == "sleep")
        signals = GateSignals(gate)
        what = signals.sleep_while_open("train", 100) if waits == "sleep" else signals.wait_open("train")
        task: asyncio.Task[object] = asyncio.create_task(what)
        await soon()
        assert len(signals._waiting) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert not signals._waiting
        gate.close(LANES, "abort")
        gate.open(LANES)

    run()


@virtual
async def test_a_thousand_flaps_leak_nothing() -> None:
    """However often the gate moves, only those who wait now are kept."""  # P11
    gate = Gate()
    signals = GateSignals(gate)
    for _ in range(1000):
        gate.close(LANES, "abort")
        waiter = asyncio.create_task(signals.wait_open("train"))
        await soon(1)
        gate.open(LANES)
        await waiter
    assert not signals._waiting
    assert gate.epoch("train") == 1000


@virtual
async def test_thousands_are_woken_a_slice_a_turn() -> None:
    """However many wait, one turn wakes few of them; all are woken in the end, in the order they came."""  # P16
    gate = Gate(is_open=False)
    signals = GateSignals(gate)
    woken: list[int] = []

    async def wait(number: int) -> None:
        await signals.wait_open("train")
        woken.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(1000)]
    await soon()
    gate.open(["train"])
    most = before = 0
    while len(woken) < 1000:
        await asyncio.sleep(0)
        most, before = max(most, len(woken) - before), len(woken)
    assert 0 < most <= 64
    assert woken == sorted(woken)
    await asyncio.gather(*waiting)
    assert not signals._waking._due


@virtual
async def test_whoever_is_woken_late_sees_the_gate_as_it_is_then() -> None:
    """The gate closes while thousands are being woken: those who come later stay, and come with the next opening."""
    gate = Gate(is_open=False)
    signals = GateSignals(gate)
    through: list[int] = []

    async def wait(number: int) -> None:
        await signals.wait_open("train")
        through.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(1000)]
    await soon()
    gate.open(["train"])
    await asyncio.sleep(0)
    gate.close(["train"], "abort")
    closed_at = len(through)
    await soon(1000)
    assert not signals._waking._due
    assert len(through) == closed_at < 1000
    gate.open(["train"])
    await asyncio.gather(*waiting)
    assert len(through) == 1000
