"""A step that is given up half-way: what stops all steps does not wait for it, and nobody's answer tells of it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from rollout_svc.embedded import scheduler as scheduling
from rollout_svc.embedded.engine import Engine, PauseMode
from rollout_svc.embedded.model import build
from rollout_svc.embedded.scheduler import Scheduler
from tests.embedded.helpers import CONFIG, PATIENCE_S, VOCABULARY, job, moe_model, run_to_end, small_model

CHECKS = 6
"""How often a pass through two blocks looks whether it is wanted still."""


class GivenUpAt:
    """Says that the step is given up when it is asked for the n-th time, and not afterwards."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("count", range(1, 4 * CHECKS))
def test_a_step_that_is_given_up_anywhere_changes_no_token(count: int) -> None:
    """P7: wherever a prefill or a decode is given up, tokens, logprobs and marks are those of an undisturbed run."""
    jobs = [("a", [1, 2, 3]), ("b", list(range(40))), ("c", [4])]

    def run(given_up: GivenUpAt | None) -> dict[str, tuple[list[int], list[float], list[tuple[str, int]]]]:
        made = Scheduler(small_model(), VOCABULARY, max_running=2)
        if given_up is not None:
            made.given_up = given_up
        ended = run_to_end(made, [job(rid, prompt, limit=4) for rid, prompt in jobs])
        return {rid: (one.job.ids, one.job.logprobs, one.job.marks) for rid, one in ended.items()}

    assert run(GivenUpAt(count)) == run(None)


def test_experts_that_were_taken_in_a_step_given_up_are_not_told_of() -> None:
    """P7: routed experts are those of the pass that made the token."""
    for count in (2, 5, 9, 14):
        found = []
        for given_up in (GivenUpAt(0), GivenUpAt(count)):
            made = Scheduler(moe_model(), VOCABULARY, max_running=2)
            made.given_up = given_up
            asked = job("a", limit=4)
            asked.wants_routing = True
            found.append(run_to_end(made, [asked])["a"].job)
        assert found[0].ids == found[1].ids
        assert found[0].routing is not None
        assert found[1].routing is not None
        assert torch.equal(found[0].routing, found[1].routing)


def test_who_waited_first_starts_first_after_a_step_was_given_up() -> None:
    """P7: those who did not join go back to where they stood."""
    made = Scheduler(small_model(), VOCABULARY, max_running=8)
    made.given_up = lambda: True
    for rid, prompt in (("a", range(40)), ("b", [1]), ("c", range(40)), ("d", [1])):
        made.submit(job(rid, prompt))
    with torch.inference_mode():
        made.step()
    assert [one.rid for one in made.waiting] == ["a", "b", "c", "d"]
    assert not made.batch.jobs


class Stuck(Scheduler):
    """Once in a step, stays in it until it is given up."""

    def __init__(self) -> None:
        super().__init__(build(CONFIG, 0), VOCABULARY, max_running=2)
        self.inside = threading.Event()
        self.left = threading.Event()

    def step(self) -> None:
        self.inside.set()
        while not self.given_up():
            assert not self.left.wait(0.001)
        super().step()


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_a_pause_waits_for_no_step(mode: PauseMode) -> None:
    """P1 P24: an engine in the middle of a long prefill stands at once; the prefill is made again when it goes on."""
    made = Stuck()
    engine = Engine(made)
    engine.start()
    try:
        answer = asyncio.get_running_loop().create_task(engine.generate(job("a")), name="answer")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(made.inside.wait)
            await engine.pause(mode)
            if mode == "abort":
                assert (await answer).finish_reason["type"] == "abort"
            else:
                assert not made.busy
                assert [one.rid for one in made.waiting] == ["a"]
                engine.abort_all()
                await engine.pause("abort")
                assert (await answer).finish_reason["type"] == "abort"
    finally:
        made.left.set()
        await engine.close()


async def test_what_is_not_paused_is_resumed_at_once() -> None:
    """P1: a resume that finds nothing paused waits for no step, and has none given up, however often it comes."""
    made = Stuck()
    engine = Engine(made)
    engine.start()
    try:
        answer = asyncio.get_running_loop().create_task(engine.generate(job("a")), name="answer")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(made.inside.wait)
            await engine.resume()
            assert not made.given_up()
            await engine.pause("in_place")
            made.inside.clear()
            await engine.resume()
            assert not made.frozen
            await asyncio.to_thread(made.inside.wait)
            engine.abort_all()
            assert (await answer).finish_reason["type"] == "abort"
    finally:
        made.left.set()
        await engine.close()


def test_a_large_model_takes_one_prompt_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: what is taken in at one step is bounded by its work, so an abort waits for one prompt and not for all."""
    monkeypatch.setattr(scheduling, "PREFILL_WORK", 1)
    made = Scheduler(small_model(), VOCABULARY, max_running=8)
    for rid in ("a", "b", "c"):
        made.submit(job(rid))
    with torch.inference_mode():
        for count in (1, 2, 3):
            made.step()
            assert len(made.batch.jobs) == count
