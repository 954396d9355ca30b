"""A judger's rate, its second chances, and what it says when it has no verdict."""

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import Interrupted, JudgeFailed, SampleFailure
from rollout_svc.judging import JudgeDesk, JudgedSample, Reward
from rollout_svc.plugins import PluginSpec
from tests.support.court import TIMEOUT_S, Court, Judger, a_sample, now, reason_of, takes
from tests.support.virtual import soon, virtual


def court_of(judger: Any, **limits: Any) -> Court:
    """Make a court whose desk has limits."""
    court = Court(judger)
    court.desk = JudgeDesk(name="j", judger=judger, spec=PluginSpec("m:a", {}), timeout_s=TIMEOUT_S, **limits)
    court.judging.add_desk(court.desk)
    return court


class Moody:
    """Fails as often as it is told, then gives one point; says when it was asked."""

    def __init__(self, *failures: Any) -> None:
        self.failures = list(failures)
        self.asked: list[float] = []

    async def judge(self, sample: JudgedSample) -> Any:
        self.asked.append(now())
        failure = self.failures.pop(0) if self.failures else 1.0
        if isinstance(failure, Exception):
            raise failure
        return failure


# -- rate ----------------------------------------------------------------------------------------------------


@virtual
async def test_no_more_calls_begin_in_a_minute_than_asked_for() -> None:
    """Thirty a minute begin two seconds apart, in order, whoever waits; the wait is not counted."""  # P21
    judger = Moody()
    court = court_of(judger, per_minute=30)
    calls = [court.ask(number) for number in range(20)]
    assert await asyncio.gather(*calls) == [[Reward(1.0)]] * 20
    assert judger.asked == pytest.approx([2.0 * number for number in range(20)])
    assert court.empty()


@virtual
async def test_an_instant_judger_keeps_its_rate_too() -> None:
    """A rate is a rate, also where the judger is called in the loop."""

    class Instant:
        instant = True

        def judge(self, sample: JudgedSample) -> float:
            return 1.0

    court = court_of(Instant(), per_minute=60)
    await asyncio.gather(*(court.ask(number) for number in range(4)))
    assert now() == pytest.approx(3.0)
    assert court.empty()


@virtual
async def test_a_newcomer_does_not_overtake_who_waits_for_the_rate() -> None:
    """Whoever asks in the moment before the next call may begin stands in line."""
    court = court_of(Moody(), per_minute=60)
    order: list[int] = []

    async def asks(number: int, at: float) -> None:
        await asyncio.sleep(at)
        await court.judging.judge(court.desk, "train", [a_sample(number)])
        order.append(number)

    await asyncio.gather(asks(0, 0), asks(1, 0.5), asks(2, 1 - 5e-7))
    assert order == [0, 1, 2]
    assert court.empty()


@virtual
async def test_rate_and_places_hold_together() -> None:
    """A free place waits for the rate, and the rate for a free place."""
    judger = takes(5)
    court = court_of(judger, per_minute=60, concurrency=2)
    await asyncio.gather(*(court.ask(number) for number in range(4)))
    assert judger.most == 2
    assert now() == pytest.approx(11)  # begun at 0, 1, 5 and 6
    assert court.empty()


@virtual
async def test_whoever_waits_for_the_rate_leaves_when_the_gate_closes() -> None:
    """No judge of a closed lane starts because its minute came; the other lane's does."""  # P13, P15
    judger = Moody()
    court = court_of(judger, per_minute=6)
    first, second, evaluation = court.ask(0), court.ask(1), court.ask(2, "eval")
    await first
    court.gate.close(["train"], "keep")
    with pytest.raises(Interrupted):
        await second
    assert await evaluation == [Reward(1.0)]
    assert judger.asked == pytest.approx([0.0, 10.0])
    assert court.empty()


@virtual
async def test_a_caller_that_left_the_line_is_passed_over() -> None:
    """One that was cancelled while it waited for the rate costs the next one nothing."""  # P14
    judger = Moody()
    court = court_of(judger, per_minute=6)
    first, second, third = (court.ask(number) for number in range(3))
    await first
    second.cancel()
    assert await third == [Reward(1.0)]
    assert second.cancelled()
    assert judger.asked == pytest.approx([0.0, 10.0])
    assert court.empty()


# -- once more -----------------------------------------------------------------------------------------------


@virtual
async def test_a_failed_judge_is_asked_again_at_growing_distances() -> None:
    """An error, no number and a refusal are each repeated; the verdict that comes then is the reward."""  # P21
    judger = Moody(ValueError("odd"), "not a number", JudgeFailed("busy", "come back"))
    court = court_of(judger, redos=3)
    assert await court.ask() == [Reward(1.0)]
    assert judger.asked == pytest.approx([0.0, 1.0, 3.0, 7.0])
    assert court.empty()


@virtual
async def test_a_judge_is_not_asked_for_ever() -> None:
    """With its second chances used up, the last failure is the sample's; nothing is made a 0."""  # P2, P21
    judger = Moody(*[JudgeFailed("busy")] * 9)
    court = court_of(judger, redos=2)
    with pytest.raises(SampleFailure, match="judge_error: j: busy"):
        await court.ask()
    assert len(judger.asked) == 3
    assert court.empty()


@virtual
async def test_a_hung_judge_is_asked_again_too() -> None:
    """Each call has the whole timeout, and no place is held between two."""  # P21
    judger = takes(1e9)
    court = court_of(judger, redos=1, concurrency=1)
    assert await reason_of(court.ask()) == "judge_timeout"
    assert now() == pytest.approx(2 * TIMEOUT_S + 1)
    assert (judger.started, court.empty()) == (2, True)


@virtual
async def test_no_judge_is_asked_again_while_the_gate_is_closed() -> None:
    """A judge that rests between two tries leaves at once when its gate closes."""  # P8, P13
    judger = Moody(ValueError("odd"))
    court = court_of(judger, redos=3)
    call = court.ask()
    await soon()
    court.gate.close(["train"], "abort")
    with pytest.raises(Interrupted):
        await call
    assert (now(), len(judger.asked), court.empty()) == (0.0, 1, True)


@virtual
async def test_a_caller_that_is_cancelled_between_two_tries_leaves() -> None:
    """Cancelling propagates from the rest between two tries."""  # P14
    court = court_of(Moody(ValueError("odd")), redos=3)
    call = court.ask()
    await soon()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert court.empty()


# -- what is said --------------------------------------------------------------------------------------------


@virtual
async def test_a_judger_says_why_it_has_no_verdict() -> None:
    """Raised or returned, its reason and message are told under `judge_error`, and nothing of a traceback."""  # P2
    for judger in (Moody(JudgeFailed("no_tests", "the prompt has none")), takes(0, JudgeFailed("no_tests"))):
        with pytest.raises(SampleFailure, match=r"^judge_error: j: no_tests") as caught:
            await Court(judger).ask()
        assert ".py:" not in str(caught.value)


@virtual
async def test_where_a_judger_raised_is_told() -> None:
    """The file and line are those of the judger's own code."""

    async def behave() -> Any:
        return int("x")

    with pytest.raises(SampleFailure, match=r"ValueError: invalid literal.* \(.*test_judge_limits\.py:\d+ in behave\)"):
        await Court(Judger(behave)).ask()


@pytest.mark.parametrize("parts", [{"a": float("nan")}, {"a": None}, {"a": "1"}, {1: 1.0}, ["a"], {"a": float("inf")}])
def test_parts_are_finite_numbers_by_name(parts: Any) -> None:
    """A part that is no number is refused as a reward is, and typed."""  # P2

    @virtual
    async def run() -> None:
        assert await reason_of(Court(takes(0, Reward(1.0, parts))).ask()) == "judge_invalid"

    run()
