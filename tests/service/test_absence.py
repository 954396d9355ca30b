"""No worker left: the service waits and says so, or fails loudly when it was told to; and nobody counts a pause."""

from __future__ import annotations

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import ComponentDied, ProducerWaiting
from rollout_svc.observe.metrics import Metrics
from tests.support.answers import two_tokens as answered
from tests.support.fake_sglang import FakeSGLang, Status
from tests.support.stage import stage


async def test_by_default_it_waits_for_ever_and_says_so() -> None:
    """Status, metrics and one event tell that nobody is in traffic, for how long, and why."""  # P18 P23
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4) as made:
        metrics = Metrics(made.service.bus, made.service.status)
        await engine.wait_running(1)
        assert made.service.status()["producer"]["no_worker_s"] is None
        await engine.kill()
        await made.until(lambda: made.parts.producer.waiting == "no_worker")
        producer = made.service.status()["producer"]
        assert producer["waiting_for"] == "no_worker"
        assert producer["no_worker_s"] >= 0.0
        [waiting] = made.of(ProducerWaiting)
        assert (waiting.reason, waiting.detail[:4]) == ("no_worker", "w0: ")
        page = metrics.render()[0].decode()
        assert 'rollout_producer_waiting{reason="no_worker"} 1.0' in page
        assert "rollout_no_worker_seconds" in page
        assert made.service.state == "running"
        engine.answer = answered
        await engine.listen()
        await made.take()
        assert made.service.status()["producer"]["no_worker_s"] is None


async def test_told_to_it_fails_with_the_names_and_the_reasons() -> None:
    """After the time it was given the service is `failed`, and every wait on it ends at once, saying why."""  # P23
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=4, producer={"no_worker_timeout_s": 0.3}) as made,
    ):
        made.may_die = True
        await made.until(lambda: one.running == 2 and two.running == 2)
        taking = made.start(made.service.take_batch(0, 1, 20.0))
        await one.kill()
        await two.kill()
        with pytest.raises(NotNow) as refused:
            await taking
        assert refused.value.type == "failed"
        assert "no_worker_timeout_s = 0.3 s" in str(refused.value)
        assert "w0 DEAD: " in str(refused.value)
        assert set(refused.value.detail["workers"]) == {"w0", "w1"}
        assert refused.value.detail["workers"]["w1"].startswith("DEAD: ")
        assert made.service.state == "failed"
        [death] = made.of(ComponentDied)
        assert death.component == "workers"
        with pytest.raises(NotNow, match="no worker was in traffic"):
            await made.service.pause()


async def test_an_engine_that_only_comes_back_to_fail_is_not_there() -> None:
    """One that answers its probe and refuses every request does not keep a service waiting for ever."""  # P23
    producer = {"no_worker_timeout_s": 1.5}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=30, producer=producer) as made:
        made.may_die = True
        engine.answer = lambda _: Status(503)
        engine.release(fate=Status(503))
        await made.until(lambda: made.service.state == "failed")
        assert "w0 RECOVERING: " in made.of(ComponentDied)[0].error


async def test_nobody_is_missed_while_paused() -> None:
    """The time of a pause is the trainer's: engines may be away as long as it lasts."""
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, producer={"no_worker_timeout_s": 0.2}) as made,
    ):
        await engine.wait_running(1)
        await made.pause()
        await engine.kill()
        await made.until(lambda: not made.parts.pool.active)
        assert made.service.status()["producer"]["no_worker_s"] is None
        engine.answer = answered
        with pytest.raises(NotNow, match="paused"):
            await made.take(timeout_s=0.4)
        await engine.listen()
        await made.until(lambda: bool(made.parts.pool.active))
        await made.resume()
        await made.take()
        assert made.service.state == "running"
