"""What each judger costs: waiting apart from running, failures by reason, the slowest samples by name."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.gate import LANES, Gate
from rollout_svc.judging import JudgeDesk, Judging
from rollout_svc.judging.figures import JudgeFigures
from rollout_svc.judging.processes import JudgePool
from rollout_svc.observe.metrics import Metrics
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.tasks import TaskOwner
from tests.support.court import Court, a_sample, reason_of, takes
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import stage
from tests.support.virtual import soon, virtual

CALLS = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([None, "judge_error", "judge_timeout"]))
)


@given(CALLS)
def test_the_slowest_and_the_longest_are_those_of_all_calls(calls: list[tuple[float, float, str | None]]) -> None:
    """Whatever came when: every call is counted once, and the three that ran longest are named."""
    figures = JudgeFigures()
    for number, (queue_s, run_s, failed) in enumerate(calls):
        figures.ended(f"s{number}", queue_s, run_s, failed)
    record = figures.as_json(running=1, waiting=2)
    assert record["judged"] + sum(record["failed"].values()) == len(calls)
    longest = sorted((run_s for _, run_s, _ in calls), reverse=True)[:3]
    assert [one["run_s"] for one in record["slowest"]] == longest
    assert record["queue_s"]["max"] == max((queue_s for queue_s, _, _ in calls), default=0.0)
    assert all(calls[int(one["sample_id"][1:])][1] == one["run_s"] for one in record["slowest"])


@virtual
async def test_waiting_is_told_apart_from_running() -> None:
    """Three judges of four seconds, one at a time: the last waited for eight and ran for four."""  # P21
    court = Court(takes(4), concurrency=1)
    calls = [court.ask(number) for number in range(3)]
    await soon()
    now = court.judging.as_json()["j"]
    assert (now["running"], now["waiting"]) == (1, 2)
    await asyncio.gather(*calls)
    record = court.judging.as_json()["j"]
    assert (record["judged"], record["running"], record["waiting"]) == (3, 0, 0)
    assert record["queue_s"] == {"p50": pytest.approx(4), "max": pytest.approx(8)}
    assert record["run_s"] == {"p50": pytest.approx(4), "max": pytest.approx(4)}


@virtual
async def test_failures_are_counted_by_reason_and_pauses_apart() -> None:
    """A judge that timed out is a failure with its sample's name; one that a pause ended is none."""  # P13
    court = Court(takes(1e9))
    assert await reason_of(court.ask(7)) == "judge_timeout"
    cut = court.ask(8)
    await soon()
    court.judging.interrupt(LANES, 10)
    await asyncio.gather(cut, return_exceptions=True)
    record = court.judging.as_json()["j"]
    assert (record["judged"], record["failed"], record["interrupted"]) == (0, {"judge_timeout": 1}, 1)
    assert [one["sample_id"] for one in record["slowest"]] == ["s7"]


async def test_waiting_for_a_process_is_waiting() -> None:
    """Two judges of a fifth of a second in one process: the second waited, and that is not its run."""  # P21
    pool = JudgePool(max_workers=1)
    judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=pool)
    spec = PluginSpec("tests.support.judgers:Takes", {"seconds": 0.2})
    desk = JudgeDesk(name="takes", judger=construct(spec, "judger"), spec=spec, timeout_s=20)
    judging.add_desk(desk)
    calls = [asyncio.create_task(judging.judge(desk, "train", [a_sample(number)])) for number in range(2)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await soon()
    now = judging.as_json()["takes"]
    assert (now["judged"], now["running"], now["waiting"]) == (1, 1, 0)
    await asyncio.gather(*calls)
    await pool.close()
    record = judging.as_json()["takes"]
    assert record["queue_s"]["max"] >= 0.2
    assert 0.2 <= record["run_s"]["max"] < record["queue_s"]["max"]
    assert len(record["slowest"]) == 2


async def test_status_and_metrics_tell_what_judges_cost() -> None:
    """Each judger has its counts, its seconds in line and running, and its slowest samples in both."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4) as made:
        engine.answer = lambda _: Reply(tokens=2)
        metrics = Metrics(made.service.bus, made.service.status)
        await made.take()
        [(name, record)] = made.service.status()["judges"].items()
        assert record["judged"] >= 1
        assert set(record) >= {"failed", "interrupted", "running", "waiting", "queue_s", "run_s", "slowest"}
        page = metrics.render()[0].decode()
        assert f'rollout_judge_calls{{judger="{name}",state="judged"}} ' in page
        assert f'rollout_judge_seconds{{judger="{name}",of="p50",part="run"}} ' in page
