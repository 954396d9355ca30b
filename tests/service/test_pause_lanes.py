"""Lanes apart: a pause of one leaves the other's requests running, counting, and starting."""

from __future__ import annotations

from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import lines, stage

TWO = {"train_batch_size": 2}


async def test_the_other_lane_runs_on_through_a_pause() -> None:
    """Pausing `train` aborts by request id: an evaluation on the same engine runs on, and others start."""  # P15
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=2, trainer=TWO) as made,
    ):
        first = made.start(made.evaluate(2))
        await engine.wait_running(4)
        report = await made.pause(2.0, lanes=("train",))
        assert (report.clean, report.workers["w0"].in_flight, report.workers["w0"].residual) == (True, 2, 0)
        assert (engine.running, report.ledger["samples"]["in_flight"]) == (2, 0)
        assert all("rid" in abort and not abort.get("abort_all") for abort in engine.aborts)
        second = made.start(made.evaluate(lines(1)))
        await engine.wait_running(3)
        engine.release(tokens=[1])
        assert [sample["response_ids"] for sample in [*await first, *await second]] == [[1]] * 3


async def test_pausing_evaluations_spares_training() -> None:
    """The other way round: training goes on, and the evaluation continues from its tokens after resume."""  # P15
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        report = await made.pause(2.0, lanes=("eval",))
        assert (report.clean, engine.running) == (True, 1)
        assert made.parts.evaluations.ledger.groups("aborted") == 1
        engine.release(tokens=[1])
        assert (await made.take())["groups"]
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        [sample] = await evaluating
        assert sample["response_ids"][-1] == 9
        assert len(sample["response_ids"]) == 4  # three from before the pause


async def test_waiting_for_one_lane_leaves_the_other_open() -> None:
    """`wait` for train: its request finishes, while evaluations start behind its back."""  # P15
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        [call] = engine.calls("running")
        pausing = made.start(made.pause(20.0, mode="wait", lanes=("train",)))
        await made.until(lambda: made.service.state == "pausing")
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        engine.release(call, tokens=[1])
        assert (await pausing).clean
        engine.release(tokens=[2])
        await evaluating
        assert made.groups("ready") == 1


async def test_neither_lane_starves_the_other() -> None:
    """One slot for both, and more than one of each lane in line: they take turns."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4) as made:
        await made.service.set_concurrency(limits={"w0": 1})
        await engine.wait_running(1)
        evaluating = made.start(made.evaluate(4))
        await made.until(lambda: len(made.parts.pool.line) >= 4)
        for number in range(8):
            await engine.wait_requests(number + 1)
            assert engine.running == len(made.worker().calls) == 1
            engine.release(tokens=[1])
        await evaluating
        served = ["eval" if call.prompt_ids[-1] >= 90 else "train" for call in engine.requests]
        assert (served.count("eval"), served.count("train")) == (4, 4)
        assert all("eval" in served[place : place + 2] for place in range(1, 6, 2))
        assert all("train" in served[place : place + 2] for place in range(1, 6, 2))
