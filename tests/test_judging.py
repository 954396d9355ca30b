"""Judge calls: they start only when they may, end once and in time, and leave when they must."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.errors import Interrupted, SampleFailure
from rollout_svc.gate import LANES, Lane
from rollout_svc.judging import Reward
from tests.support.court import TIMEOUT_S, Court, Judger, a_sample, now, reason_of, takes
from tests.support.virtual import soon, virtual

# -- time ----------------------------------------------------------------------------------------------------


@virtual
async def test_queueing_is_not_counted_against_a_judge() -> None:
    """Five judges of nine seconds each, one at a time, all keep a timeout of ten."""  # P21
    court = Court(takes(9), concurrency=1)
    calls = [court.ask(number) for number in range(5)]
    assert [await call for call in calls] == [[Reward(1.0)]] * 5
    assert now() == pytest.approx(45)
    assert court.empty()


@virtual
async def test_a_hung_judge_ends_at_its_timeout() -> None:
    """A judge that never answers is a typed failure at its own timeout, and its place is free."""  # P21
    judger = takes(1e9)
    court = Court(judger, concurrency=1)
    hung, next_one = court.ask(0), court.ask(1)
    assert await reason_of(hung) == "judge_timeout"
    assert now() == pytest.approx(TIMEOUT_S)
    await soon()
    assert (judger.started, judger.running) == (2, 1)
    assert await reason_of(next_one) == "judge_timeout"
    assert now() == pytest.approx(2 * TIMEOUT_S)
    assert court.empty()


@virtual
async def test_a_judge_that_swallows_cancellation_changes_nothing() -> None:
    """The result of a judge that went on after its timeout reaches nobody, and nobody waits for it."""  # P13, P8

    async def behave() -> float:
        for _ in range(3):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                continue
        return 1.0

    judger = Judger(behave)
    court = Court(judger)
    call = court.ask()
    assert await reason_of(call) == "judge_timeout"
    assert now() == pytest.approx(TIMEOUT_S)
    assert court.empty()
    assert judger.running == 1
    [straggler] = court.tasks.live
    assert await straggler == 1.0


# -- pauses --------------------------------------------------------------------------------------------------


@virtual
async def test_no_judge_starts_while_the_gate_is_closed() -> None:
    """Closed is closed: the sample is judged after the pause."""  # P13
    judger = takes(1)
    court = Court(judger)
    court.gate.close(["train"], "keep")
    with pytest.raises(Interrupted):
        await court.ask()
    assert judger.started == 0
    assert await court.ask(lane="eval") == [Reward(1.0)]  # P15
    assert court.empty()


@virtual
async def test_whoever_waits_leaves_when_the_gate_closes() -> None:
    """Queued judges of that lane end at once; running ones go on, and the other lane keeps its turn."""  # P13, P15
    judger = takes(5)
    court = Court(judger, concurrency=1)
    running = court.ask(0)
    queued = [court.ask(number) for number in range(1, 4)]
    evaluation = court.ask(9, "eval")
    await soon()
    court.gate.close(["train"], "keep")
    await soon()
    for call in queued:
        assert isinstance(call.exception(), Interrupted)
    assert await running == [Reward(1.0)]
    assert await evaluation == [Reward(1.0)]
    assert judger.started == 2
    assert now() == pytest.approx(10)
    assert court.empty()


@virtual
async def test_a_turn_that_came_as_the_gate_closed_is_not_taken() -> None:
    """A judge whose place became free in the step that closed the gate neither starts nor keeps the place."""  # P13
    judger = takes(5)
    court = Court(judger, concurrency=1)

    async def closes_after() -> None:
        await court.judging.judge(court.desk, "train", [a_sample()])
        court.gate.close(["train"], "abort")

    first = asyncio.create_task(closes_after())
    second, evaluation = court.ask(1), court.ask(2, "eval")
    await first
    with pytest.raises(Interrupted):
        await second
    assert now() == pytest.approx(5)
    assert await evaluation == [Reward(1.0)]
    assert judger.started == 2
    assert court.empty()


@virtual
async def test_the_free_place_is_for_who_waits() -> None:
    """A newcomer never takes the place that was just given to somebody who waited; those wait in order."""
    court = Court(takes(1), concurrency=1)
    order: list[int] = []

    async def asks(number: int, then: int | None = None) -> None:
        await court.judging.judge(court.desk, "train", [a_sample(number)])
        order.append(number)
        if then is not None:
            await asks(then)  # in the very step that gave the place back

    await asyncio.gather(asks(0, then=3), asks(1), asks(2))
    assert order == [0, 1, 2, 3]
    assert court.empty()


@virtual
async def test_a_newcomer_cannot_keep_a_waiter_past_its_gate() -> None:
    """Where the other lane's judge comes in the same step, whoever waits still leaves when its gate closes."""  # P13
    court = Court(takes(5), concurrency=1)

    async def first() -> list[Reward]:
        await court.judging.judge(court.desk, "eval", [a_sample()])
        court.gate.close(["train"], "abort")
        return await court.judging.judge(court.desk, "eval", [a_sample()])

    evaluations = asyncio.create_task(first())
    waits = court.ask(1)
    with pytest.raises(Interrupted):
        await waits
    assert now() == pytest.approx(5)
    assert await evaluations == [Reward(1.0)]
    assert court.empty()


@virtual
async def test_a_pause_ends_running_judges_in_slices() -> None:
    """As many as asked for at a time, of those lanes only, until none is left; their samples are judged later."""  # P8
    judger = takes(5)
    court = Court(judger)
    calls = [court.ask(number) for number in range(10)]
    evaluation = court.ask(11, "eval")
    await soon()
    assert (court.judging.pending(["train"]), court.judging.pending(LANES)) == (10, 11)
    assert [court.judging.interrupt(["train"], 4) for _ in range(4)] == [4, 4, 2, 0]
    await soon()
    assert court.judging.pending(["train"]) == 0
    assert all(isinstance(call.exception(), Interrupted) for call in calls)
    assert judger.running == 1
    assert await evaluation == [Reward(1.0)]
    assert court.empty()


@virtual
async def test_an_interrupted_judge_cannot_change_the_result() -> None:
    """A judge that answers its cancellation with a verdict is not heard."""  # P13

    async def behave() -> float:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    court = Court(Judger(behave))
    call = court.ask()
    await soon()
    court.judging.interrupt(LANES, 1)
    with pytest.raises(Interrupted):
        await call
    assert court.empty()


@pytest.mark.parametrize("queued", [False, True])
def test_cancelling_the_caller_propagates(queued: bool) -> None:
    """A caller that is cancelled takes its judge along and frees its place, or leaves the queue."""  # P14

    @virtual
    async def run() -> None:
        judger = takes(5)
        court = Court(judger, concurrency=1)
        other = court.ask(0) if queued else None
        call = court.ask(1)
        await soon()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelled()
        await soon()
        assert judger.running == int(queued)
        if other is not None:
            assert await other == [Reward(1.0)]
        assert await court.ask(2) == [Reward(1.0)]
        assert court.empty()

    run()


# -- all of it together --------------------------------------------------------------------------------------

asks = st.tuples(
    st.integers(0, 20),  # when it is asked
    st.sampled_from(LANES),
    st.none() | st.integers(0, 40),  # when its caller is cancelled
)


@given(
    st.lists(asks, max_size=12),
    st.integers(1, 3),
    st.integers(0, 15),
    st.none() | st.integers(0, 40),
    st.none() | st.integers(0, 40),
)
@virtual
async def test_every_call_ends_once_and_every_place_comes_back(
    plan: list[tuple[int, Lane, int | None]], concurrency: int, takes_s: int, closes: int | None, opens: int | None
) -> None:
    """Under any order of calls, cancellations and gate moves: in bounds, in time, and nothing is left."""  # P1, P8
    judger = takes(takes_s)
    court = Court(judger, concurrency=concurrency)
    loop = asyncio.get_running_loop()
    calls: list[asyncio.Task[list[Reward]]] = []

    def ask(number: int, lane: Lane, cancelled: int | None) -> None:
        call = court.ask(number, lane)
        calls.append(call)
        if cancelled is not None:
            loop.call_at(cancelled, call.cancel)

    for number, (at, lane, cancelled) in enumerate(plan):
        loop.call_at(at, ask, number, lane, cancelled)
    if closes is not None:
        loop.call_at(closes, lambda: court.gate.close(LANES, "abort"))
    if opens is not None:
        loop.call_at(opens, court.gate.open, LANES)
    await asyncio.sleep(21)
    for call in calls:
        await asyncio.wait([call])
        outcome = "cancelled" if call.cancelled() else call.exception()
        assert outcome in (None, "cancelled") or isinstance(outcome, Interrupted | SampleFailure)
        if isinstance(outcome, SampleFailure):
            assert (outcome.reason, takes_s >= TIMEOUT_S) == ("judge_timeout", True)
    assert judger.most <= concurrency
    assert court.empty()
