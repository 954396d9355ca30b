"""A worker that comes back is another one: a new number, the current weights before any traffic, its share again."""

from __future__ import annotations

from pathlib import Path

from rollout_svc.events import WorkerChanged
from rollout_svc.workers.worker import WorkerState
from tests.support.answers import two_tokens as answered
from tests.support.fake_sglang import FakeSGLang, Status
from tests.support.stage import Stage, stage


def told(made: Stage) -> list[tuple[str, int]]:
    """The states a fleet of one went through, each with the incarnation that was told."""
    return [(event.after, event.incarnation) for event in made.of(WorkerChanged)]


async def test_back_from_the_dead_it_has_a_new_number() -> None:
    """1 at the start, 2 when it is back; status and events say so."""  # P19
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        assert made.service.status()["workers"][0]["incarnation"] == 1
        engine.script("/ping", Status(503), times=None)
        await engine.refuse()
        await engine.kill()
        await made.until(lambda: not made.parts.pool.active)
        made.parts.supervisor._declare_dead(made.worker(), "for certain")
        assert told(made)[-1] == ("DEAD", 1)
        engine.answer = answered
        engine.heal()
        await engine.listen()
        await made.take()
        assert told(made)[0] == ("ACTIVE", 1)
        assert told(made)[-1] == ("ACTIVE", 2)
        assert made.service.status()["workers"][0]["incarnation"] == 2


async def test_found_restarted_it_has_a_new_number_and_the_weights_first(tmp_path: Path) -> None:
    """An engine that was restarted in silence is told by its label, and makes no token before its weights."""  # P19
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        await made.pause()
        await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)})
        await made.resume()
        await made.push(1)
        await engine.wait_running(1)
        served = len(engine.requests)
        await engine.restart()
        engine.answer = answered
        batch = await made.take(step=1)
        assert [span["version"] for span in batch["groups"][0]["samples"][0]["weight_versions"]] == [1]
        assert made.worker().incarnation == 2
        assert len(engine.requests) == served + 1  # one request after the restart, none of it under old weights
        assert engine.weight_version == "1"


async def test_a_worker_that_rested_is_the_same_one() -> None:
    """A breaker that opened and closed again is no restart."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=8) as made:
        await engine.wait_running(4)
        engine.release(fate=Status(500))
        engine.answer = lambda _: Status(500)
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        engine.answer = answered
        await made.take(groups=4)
        assert made.worker().incarnation == 1


async def test_back_again_it_gets_its_share() -> None:
    """Of two workers the one that died serves one request as a trial, and then as many as the other."""  # P19
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=40, trainer={"max_batch_per_worker": 2, "allow_over_concurrency_ratio": 1.0}) as made,
    ):
        await made.until(lambda: one.running == 2 and two.running == 2)
        await one.kill()
        await made.until(lambda: made.worker(0).state is not WorkerState.ACTIVE and two.running == 2)
        await one.listen()
        await made.until(lambda: one.running == 1 and two.running == 2)
        one.release(tokens=1)
        await made.until(lambda: one.running == 2 and two.running == 2)
        assert [worker.tokens for worker in made.parts.pool.workers.values()] == [2 * 20, 2 * 20]
