"""Routing over real calls: what the policies see of the fleet is what it does."""

from __future__ import annotations

from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import PROMPT, stage

GROUPS = {"prompt_repeat_k": 4, "train_batch_size": 2}
TOKENS = len(PROMPT) + 1 + 16
"""Of one call in flight: its prompt, and what it may still make."""


def prompts_of(engine: FakeSGLang) -> set[int]:
    """Which prompts an engine was given, by their last token."""
    return {call.prompt_ids[len(PROMPT)] for call in engine.requests}


async def test_siblings_go_where_the_first_went() -> None:
    """With `group_affinity` a group is on one engine, and goes on there after a pause."""
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=2, trainer=GROUPS, routing="group_affinity") as made,
    ):
        await made.until(lambda: one.running == 4 and two.running == 4)
        before = prompts_of(one), prompts_of(two)
        assert [len(prompts) for prompts in before] == [1, 1]
        await made.pause()
        await made.resume()
        await made.until(lambda: one.running == 4 and two.running == 4)
        assert (prompts_of(one), prompts_of(two)) == before


async def test_tokens_in_flight_are_what_was_given_and_may_be_made() -> None:
    """Each worker's sum is that of its calls, also of those that go on with a longer prefix; 0 when nothing runs."""
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=2, trainer=GROUPS) as made,
    ):
        await made.until(lambda: one.running == 4 and two.running == 4)
        assert [worker["tokens_in_flight"] for worker in made.service.workers()] == [4 * TOKENS] * 2
        await made.pause()
        assert [worker["tokens_in_flight"] for worker in made.service.workers()] == [0, 0]
        await made.resume()
        await made.until(lambda: one.running == 4 and two.running == 4)
        # Tokens that were made before the pause are in the prefix now, and are not to be made again.
        assert [worker["tokens_in_flight"] for worker in made.service.workers()] == [4 * TOKENS] * 2


async def test_each_in_its_turn() -> None:
    """With `round_robin` everyone gets the same number, whatever their limits."""
    async with FakeSGLang(weight_version="0") as one, FakeSGLang(weight_version="0") as two:
        workers = ({"url": one.url, "max_batch": 8}, {"url": two.url, "max_batch": 64})
        async with stage(*workers, pushed=2, trainer=GROUPS, routing="round_robin"):
            await one.wait_running(4)
            await two.wait_running(4)


async def test_a_worker_that_is_leaving_gets_no_sibling() -> None:
    """DRAINING takes nothing new, not even of a group whose prefix it has."""
    trainer = GROUPS | {"train_batch_size": 1}
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=1, trainer=trainer, routing="group_affinity") as made,
    ):
        await made.until(lambda: one.running + two.running == 4)
        home, other, worker_id = (one, two, "w0") if one.running else (two, one, "w1")
        await made.pause()
        await made.service.remove_worker(worker_id)
        await made.resume()
        await made.until(lambda: other.running == 4)
        assert len(home.requests) == 4
