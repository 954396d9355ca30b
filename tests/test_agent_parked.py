"""A loop that parks: its turn waits for the gate and goes on, over as many segments as it takes."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.errors import Interrupted, StaleAttempt
from rollout_svc.sample import SampleStatus
from tests.support.caller import Table, answer, told
from tests.support.virtual import soon, virtual

S = SampleStatus
PROMPT = [1, 2, 3]


def park() -> Table:
    """Set a table for a loop that parks."""
    return Table(on_pause="park")


@virtual
async def test_a_cut_turn_waits_and_goes_on() -> None:
    """While parked it is no engine's business, stays GENERATING, and then sends its prefix."""  # P10, P15
    table = park()
    table.caller.script += [table.then(table.withdraw, answer([7, 8], "abort", late=True)), answer([9])]
    context = table.context()
    task = asyncio.create_task(context.generate(PROMPT))
    await asyncio.sleep(1000)
    assert not task.done()
    assert (context.calling, table.sample.status, table.sample.finish_reason) == (False, S.GENERATING, "abort")
    assert table.parked == 1
    table.gate.open(["train"])
    assert told(await task) == ([7, 8, 9], [-1.0] * 3, "stop")
    assert table.asks() == [(PROMPT, 10), ([*PROMPT, 7, 8], 8)]
    assert (table.sample.finish_reason, context.cut) == ("stop", None)


@virtual
async def test_a_call_that_was_interrupted_is_made_again() -> None:
    """A call that never came to an answer parks like one that was cut."""
    table = park()
    table.withdraw()
    table.caller.script += [Interrupted("closed"), answer([7])]
    task = asyncio.create_task(table.context().generate(PROMPT))
    await soon()
    assert table.parked == 1
    table.gate.open(["train"])
    assert (await task).ids == [7]


@virtual
async def test_a_late_whole_turn_waits_for_the_gate_and_is_not_generated_again() -> None:
    """The engine had stopped: after the pause the loop gets its turn, and no call is made."""  # P6
    table = park()
    table.caller.script.append(table.then(table.withdraw, answer([7, 8], "stop", late=True)))
    task = asyncio.create_task(table.context().generate(PROMPT))
    await asyncio.sleep(100)
    assert not task.done()
    table.gate.open(["train"])
    assert told(await task) == ([7, 8], [-1.0] * 2, "stop")
    assert (len(table.asks()), table.sample.finish_reason) == (1, "stop")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
@virtual
async def test_over_several_pauses_it_is_one_turn(pieces: list[int]) -> None:
    """Each pause costs a segment at most; the turn is the same as without any."""  # P6, P10
    table = Table(on_pause="park", max_tokens=50)
    token = iter(range(100, 200))
    expected: list[int] = []
    for number in pieces:
        ids = [next(token) for _ in range(number)]
        expected += ids
        table.caller.script.append(table.then(table.withdraw, answer(ids, "abort", late=True)))
    table.caller.script.append(answer([next(token)]))
    expected.append(expected[-1] + 1 if expected else 100)
    task = asyncio.create_task(table.context().generate(PROMPT))
    for number, _ in enumerate(pieces):
        await asyncio.sleep(10)
        assert (task.done(), table.parked) == (False, number + 1)
        table.gate.open(["train"])
    assert (await task).ids == expected == table.sample.response_ids
    sent = [(len(ids) - len(PROMPT), budget) for ids, budget in table.asks()]
    assert all(prefix + budget == 50 for prefix, budget in sent)
    assert len(table.sample.segments) == sum(number > 0 for number in pieces) + 1


@virtual
async def test_an_engine_that_cuts_without_a_pause_is_asked_ever_more_slowly() -> None:
    """Aborts nobody asked for make no storm: each waits longer, up to a bound."""  # P17
    table = Table(on_pause="park", max_tokens=100)
    at: list[float] = []

    def note() -> None:
        at.append(asyncio.get_running_loop().time())

    table.caller.script += [table.then(note, answer([7], "abort")) for _ in range(12)]
    table.caller.script.append(answer([8]))
    await table.context().generate(PROMPT)
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits == sorted(waits)
    assert waits[0] >= 0.05
    assert waits[-1] == pytest.approx(5.0)


@virtual
async def test_cancelling_a_parked_turn_propagates() -> None:
    """A parked loop can be cancelled, and leaves no waiter behind."""  # P14
    table = park()
    table.caller.script.append(table.then(table.withdraw, answer([7], "abort", late=True)))
    task = asyncio.create_task(table.context().generate(PROMPT))
    await soon()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert not table.signals._waiting


@virtual
async def test_a_parked_turn_whose_sample_was_taken_starts_nothing() -> None:
    """Handed back while parked: after the pause the old attempt makes no call, and writes nothing."""  # P3, P20
    table = park()
    table.caller.script.append(table.then(table.withdraw, answer([7], "abort", late=True)))
    task = asyncio.create_task(table.context().generate(PROMPT))
    await soon()
    table.hand_back()
    table.gate.open(["train"])
    with pytest.raises(StaleAttempt):
        await task
    assert (len(table.asks()), table.sample.response_ids) == (1, [7])
