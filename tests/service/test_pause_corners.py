"""Corners of the pause protocol: what a pause leaves behind, and what comes while an attempt is under way."""

from __future__ import annotations

from tests.support.fake_sglang import FakeSGLang
from tests.support.lane import Evaluation
from tests.support.stage import stage

THAW = "/continue_generation"
TWO = {"train_batch_size": 2}


async def test_a_stronger_pause_ends_what_a_later_weaker_one_froze() -> None:
    """A lane that was closed by `keep` is aborted when asked, although another lane had been aborted before."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluation = Evaluation(made.parts)
        evaluation.ask(1)
        await engine.wait_running(2)
        await made.pause(2.0, lanes=("train",))
        await made.pause(2.0, mode="keep")
        assert (engine.paused, engine.running) == ("in_place", 1)
        report = await made.pause(2.0, mode="abort")
        assert (report.mode, report.clean, engine.running, engine.paused) == ("abort", True, 0, None)
        assert made.parts.gate.epoch("eval") == 1
        await made.resume()
        await engine.wait_running(2)
        engine.release(tokens=[1])
        await evaluation.done()
