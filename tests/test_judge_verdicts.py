"""What a judger says: a finite number is a reward, and everything else is a typed failure."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rollout_svc.errors import Interrupted
from rollout_svc.gate import LANES
from rollout_svc.judging import JudgedSample, Reward
from rollout_svc.plugins import PluginSpec
from tests.support.court import TIMEOUT_S, Court, Judger, now, reason_of, takes
from tests.support.virtual import soon, virtual


class GroupJudger:
    """A judger of whole groups that returns what it was given."""

    def __init__(self, result: Any) -> None:
        self.result = result

    async def judge_group(self, samples: list[JudgedSample]) -> Any:
        return self.result(samples) if callable(self.result) else self.result


def raises(error: BaseException) -> Judger:
    """Make a judger that fails."""

    async def behave() -> Any:
        raise error

    return Judger(behave)


class Unprintable:
    """Even looking at it fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class UnprintableError(Exception):
    """An error that cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (1, Reward(1.0)),
        (0.25, Reward(0.25)),
        (True, Reward(1.0)),
        (False, Reward(0.0)),
        (Reward(np.True_, {"x": False}), Reward(1.0, {"x": 0.0})),  # type: ignore[arg-type]
        (-3, Reward(-3.0)),
        (Reward(1), Reward(1.0)),
        (Reward(0.5, {"format": 0.5}), Reward(0.5, {"format": 0.5})),
        (Reward(1, {"x": 1.0}), Reward(1.0, {"x": 1.0})),
        (np.float32(0.5), Reward(0.5)),
        (torch.tensor(0.5), Reward(0.5)),
        (Reward(np.float32(0.5), {"x": np.int64(1)}), Reward(0.5, {"x": 1.0})),  # type: ignore[arg-type,dict-item]
    ],
)
def test_a_reward_is_a_finite_number(result: Any, reward: Reward) -> None:
    """A number, or a Reward with its parts, arrives as a Reward whose value is a float."""

    @virtual
    async def run() -> None:
        court = Court(takes(1, result))
        [got] = await court.ask()
        assert (got, {type(number) for number in (got.value, *got.parts.values())}) == (reward, {float})

    run()


INVALID = [
    *(None, "1", "", [], [1.0], (1.0,), {}, {"value": 1.0}, 1j, b"1"),
    *(float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)),
    *(object(), Reward(None), Reward("1"), Reward(float("nan"))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("result", INVALID, ids=lambda value: type(value).__name__)
def test_what_is_no_reward_is_a_typed_failure(result: Any) -> None:
    """None, NaN, texts, lists and numbers beyond all bounds are failures, never 0."""  # P2, P21

    @virtual
    async def run() -> None:
        court = Court(takes(1, result))
        assert await reason_of(court.ask()) == "judge_invalid"
        assert now() == pytest.approx(1)  # at once, not at the timeout
        assert court.empty()

    run()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        TimeoutError(),
        KeyError(),
        asyncio.CancelledError(),
        UnprintableError(),
        Interrupted(),
        SystemExit(3),
        KeyboardInterrupt(),
        BaseException("of its own"),
    ],
)
def test_what_a_judger_raises_is_a_typed_failure(error: BaseException) -> None:
    """Whatever comes out of a judger, also a cancellation or an exit, fails that sample alone."""  # P12, P21

    @virtual
    async def run() -> None:
        court = Court(raises(error))
        assert await reason_of(court.ask()) == "judge_error"
        assert now() == pytest.approx(0)
        assert court.empty()

    run()


@virtual
async def test_a_result_that_cannot_be_read_is_a_typed_failure() -> None:
    """A judger whose result fails when it is looked at is answered at once too."""  # P21
    court = Court(takes(1, Unprintable()))
    assert await reason_of(court.ask()) == "judge_error"
    assert now() == pytest.approx(1)
    assert court.empty()


@virtual
async def test_a_group_is_judged_at_once() -> None:
    """A group judger gets all samples and gives one reward for each, in their order."""
    court = Court(GroupJudger(lambda samples: [index / 10 for index, _ in enumerate(samples)]))
    assert await court.ask_for_group(3) == [Reward(0.0), Reward(0.1), Reward(0.2)]
    assert court.empty()


@pytest.mark.parametrize(
    "result", [[], [1.0], [1.0] * 3, 1.0, None, (1.0, 1.0), [1.0, None], [1.0, [1.0]], Reward(1.0)]
)
def test_a_group_needs_a_reward_for_each(result: Any) -> None:
    """Too few, too many, no list, or one that is no reward: nobody in the group gets one."""  # P2, P21

    @virtual
    async def run() -> None:
        court = Court(GroupJudger(result))
        assert await reason_of(court.ask_for_group(2)) == "judge_invalid"
        assert court.empty()

    run()


# -- synchronous judgers -------------------------------------------------------------------------------------


class SyncJudger:
    """A judger that must run in a process; never called here."""

    def judge(self, sample: JudgedSample) -> float:
        raise AssertionError("a synchronous judger ran in the loop")


class Runner:
    """A hand-written runner of processes: notes what it is given, and answers when told."""

    def __init__(self) -> None:
        self.given: list[tuple[PluginSpec, str, Any, float]] = []
        self.futures: list[asyncio.Future[Any]] = []

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        self.given.append((spec, method, payload, timeout_s))
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    async def close(self) -> None:
        for future in self.futures:
            future.cancel()


@virtual
async def test_a_synchronous_judger_runs_elsewhere() -> None:
    """It is handed to a process by its spec, with the sample's values and its own timeout."""  # P21
    runner = Runner()
    court = Court(SyncJudger(), processes=runner)
    call = court.ask(4)
    await soon()
    [(spec, method, payload, timeout_s)] = runner.given
    assert (spec, method, payload.sample_id, timeout_s) == (court.desk.spec, "judge", "s4", TIMEOUT_S)
    runner.futures[0].set_result(0.5)
    assert await call == [Reward(0.5)]
    assert court.empty()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError("100"), "judge_timeout"), (ValueError("x"), "judge_error"), (OSError("died"), "judge_error")],
)
def test_a_process_that_fails_is_a_typed_failure(error: Exception, reason: str) -> None:
    """A killed judge timed out; one that raised, or whose process died, failed."""  # P21

    @virtual
    async def run() -> None:
        runner = Runner()
        court = Court(SyncJudger(), processes=runner)
        call = court.ask()
        await soon()
        runner.futures[0].set_exception(error)
        assert await reason_of(call) == reason
        assert court.empty()

    run()


@virtual
async def test_a_pause_cancels_the_process() -> None:
    """Interrupting a synchronous judge cancels its future, which is what kills it."""  # P13
    runner = Runner()
    court = Court(SyncJudger(), processes=runner)
    call = court.ask()
    await soon()
    assert court.judging.interrupt(LANES, 10) == 1
    with pytest.raises(Interrupted):
        await call
    assert runner.futures[0].cancelled()
    assert court.empty()


@virtual
async def test_without_processes_a_synchronous_judger_fails() -> None:
    """It is never run in the loop instead."""
    court = Court(SyncJudger())
    assert await reason_of(court.ask()) == "judge_error"
    assert court.empty()


# -- instant judgers -----------------------------------------------------------------------------------------


class Instant:
    """A synchronous judger that only compares, and says so."""

    instant = True

    def __init__(self, result: Any) -> None:
        self.result = result
        self.started = 0

    def judge(self, sample: JudgedSample) -> Any:
        self.started += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class InstantGroup(Instant):
    """The same for groups."""

    def judge_group(self, samples: list[JudgedSample]) -> Any:
        return [self.judge(sample) for sample in samples]


@virtual
async def test_an_instant_judger_needs_no_process() -> None:
    """It is called in the loop, for a sample or for a group."""
    court = Court(Instant(0.5))
    assert await court.ask() == [Reward(0.5)]
    group = Court(InstantGroup(1))
    assert await group.ask_for_group(2) == [Reward(1.0), Reward(1.0)]
    assert court.empty()


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "judge_invalid"),
        (10**400, "judge_invalid"),
        (float("nan"), "judge_invalid"),
        (ValueError("x"), "judge_error"),
        (TimeoutError(), "judge_error"),
        (UnprintableError(), "judge_error"),
        (Unprintable(), "judge_error"),
        (Interrupted(), "judge_error"),
        (SystemExit(3), "judge_error"),
        (KeyboardInterrupt(), "judge_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_instant_judger_fails_as_typed(result: Any, reason: str) -> None:
    """What it raises or returns is held to the same as any other judger's."""  # P2, P12

    @virtual
    async def run() -> None:
        court = Court(Instant(result))
        assert await reason_of(court.ask()) == reason
        assert court.empty()

    run()


@virtual
async def test_an_instant_judger_observes_the_gate() -> None:
    """Closed is closed, however short the work."""  # P13
    court = Court(Instant(1.0))
    court.gate.close(["train"], "keep")
    with pytest.raises(Interrupted):
        await court.ask()
    assert court.desk._judger.started == 0
