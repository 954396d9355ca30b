"""Lanes apart: a pause of one leaves the other's requests running, counting, and starting."""

from __future__ import annotations

from tests.support.fake_sglang import FakeSGLang
from tests.support.lane import Evaluation
from tests.support.stage import stage

TWO = {"train_batch_size": 2}


async def test_the_other_lane_runs_on_through_a_pause() -> None:
    """Pausing `train` aborts by request id: an evaluation on the same engine runs on, and others start."""  # P15
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=2, trainer=TWO) as made,
    ):
        evaluation = Evaluation(made.parts)
        evaluation.ask(2)
        await engine.wait_running(4)
        report = await made.pause(2.0, lanes=("train",))
        assert (report.clean, report.workers["w0"].in_flight, report.workers["w0"].residual) == (True, 2, 0)
        assert engine.running == 2
        assert all("rid" in abort and not abort.get("abort_all") for abort in engine.aborts)
        evaluation.ask(1)
        await engine.wait_running(3)
        engine.release(tokens=[1])
        assert [turn.ids for turn in await evaluation.done()] == [[1]] * 3
        assert not evaluation.errors


async def test_pausing_evaluations_spares_training() -> None:
    """The other way round: training goes on, and the evaluation continues from its tokens after resume."""  # P15
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluation = Evaluation(made.parts)
        evaluation.ask(1)
        await engine.wait_running(2)
        report = await made.pause(2.0, lanes=("eval",))
        assert (report.clean, engine.running) == (True, 1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[9])
        [turn] = await evaluation.done()
        assert turn.ids[-1] == 9
        assert len(turn.ids) == 4  # three from before the pause


async def test_waiting_for_one_lane_leaves_the_other_open() -> None:
    """`wait` for train: its request finishes, while evaluations start behind its back."""  # P15
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        [call] = engine.calls("running")
        pausing = made.start(made.pause(20.0, mode="wait", lanes=("train",)))
        await made.until(lambda: made.service.state == "pausing")
        evaluation = Evaluation(made.parts)
        evaluation.ask(1)
        await engine.wait_running(2)
        engine.release(call, tokens=[1])
        assert (await pausing).clean
        engine.release(tokens=[2])
        await evaluation.done()
        assert made.groups("ready") == 1
