"""A worker that is a router: generation passes it, everything else goes to each of its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from rollout_svc.asking import ask_engines
from rollout_svc.assembly import prepare
from rollout_svc.config import LaunchConfig, WorkerConfig
from rollout_svc.engines import EngineProfile, HttpTransport
from rollout_svc.errors import ConfigError, Conflict, NotNow, WorkerFailure
from rollout_svc.workers import breaker, launching
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_router import FakeRouter
from tests.support.fake_sglang import FakeSGLang, Reply, Reset, Status
from tests.support.stage import Stage, lines, make_config, stage


class Routed:
    """A service whose one worker is a router in front of two engines."""

    def __init__(self, made: Stage, router: FakeRouter, engines: tuple[FakeSGLang, FakeSGLang]) -> None:
        self.made = made
        self.router = router
        self.engines = engines

    @property
    def worker(self) -> dict[str, Any]:
        """What status says of the worker."""
        [worker] = self.made.service.status()["workers"]
        return dict(worker)

    def answer_all(self) -> None:
        """Generations that start from now on are answered at once."""
        for engine in self.engines:
            engine.answer = lambda _: Reply(tokens=3)

    async def until_state(self, state: str, said: str = "") -> None:
        """Wait until the worker is in a state, for a reason."""
        await self.made.until(
            lambda: self.worker["state"] == state and said in self.worker["reason"], f"{state} {said}"
        )


@asynccontextmanager
async def routed(*labels: str, ready: bool = True, **sections: Any) -> AsyncIterator[Routed]:
    """Two engines with these weight labels, a router, and a service."""
    async with AsyncExitStack() as stack:
        first, second = labels or ("0", "0")
        a = await stack.enter_async_context(FakeSGLang(weight_version=first, handler_cancellation=True))
        b = await stack.enter_async_context(FakeSGLang(weight_version=second, handler_cancellation=True))
        router = await stack.enter_async_context(FakeRouter([a.url, b.url]))
        worker = {"url": router.url, "engines": [a.url, b.url], **sections.pop("worker", {})}
        made = await stack.enter_async_context(stage(worker, ready=ready, **sections))
        for engine in (a, b):
            engine.listeners.append(made.bell.ring)
        yield Routed(made, router, (a, b))


async def test_generation_passes_it_and_control_does_not() -> None:
    """Requests are spread by the router; nothing but generation and its own list is ever asked of it."""
    async with routed() as at:
        assert at.worker["engines"] == [engine.url for engine in at.engines]
        assert at.worker["limit"] >= 2 * 64
        await at.made.push(4)
        for engine in at.engines:
            await engine.wait_running(2)
            engine.release(tokens=3)
        batch = await at.made.take(groups=4)
        assert {sample["status"] for group in batch["groups"] for sample in group["samples"]} == {"COMPLETED"}
        assert set(at.router.hits) == {"/workers", "/generate"}
        assert not at.router.refused
        assert at.router.hits["/generate"] == 4


async def test_a_pause_stops_every_engine_behind_it() -> None:
    """P9: the abort goes to each engine itself, and each is idle by its own count."""
    async with routed() as at:
        await at.made.push(4)
        for engine in at.engines:
            await engine.wait_running(2)
        report = await at.made.pause(2.0)
        assert report.clean
        tally = report.as_json()["workers"]["w0"]
        assert (tally["in_flight"], tally["residual"]) == (4, 0)
        assert "uncounted" not in tally
        assert all(engine.aborts == [{"abort_all": True}] and not engine.running for engine in at.engines)


async def test_weights_reach_every_engine_behind_it() -> None:
    """A disk update is made at each, and each has to confirm it."""
    async with routed() as at:
        await at.made.pause(2.0)
        answer = await at.made.service.update_weights(1, {"kind": "disk", "path": "/weights"})
        assert answer["workers"]["w0"] == {"ok": True, "version": 1}
        assert [engine.weight_version for engine in at.engines] == ["1", "1"]
        await at.made.resume()
        assert at.worker["weight_version"] == 1


async def test_an_update_that_misses_one_takes_the_worker_out() -> None:
    """P24: requests could land on the stale engine, so none are sent; the next update brings it back."""
    async with routed() as at:
        await at.made.pause(2.0)
        at.engines[1].fail_update = "disk full"
        with pytest.raises(NotNow) as raised:
            await at.made.service.update_weights(1, {"kind": "disk", "path": "/weights"})
        assert at.engines[1].url in str(raised.value.detail)
        assert "disk full" in str(raised.value.detail)
        assert at.worker["state"] == "QUARANTINED"
        assert [engine.weight_version for engine in at.engines] == ["1", "0"]
        at.engines[1].fail_update = False
        answer = await at.made.service.update_weights(2, {"kind": "disk", "path": "/weights"})
        assert answer["workers"]["w0"]["ok"]
        await at.made.resume()
        await at.until_state("ACTIVE")


async def test_one_engine_dies_and_comes_back() -> None:
    """P19: the worker is out, naming the engine; what the other runs goes on and counts; nothing is lost."""
    async with routed() as at:
        gone, left = at.engines
        await at.made.push(4)
        for engine in at.engines:
            await engine.wait_running(2)
        await gone.kill()
        await at.until_state("RECOVERING", gone.url)
        assert left.running == 2
        left.release(tokens=3)
        await at.made.take(step=0, groups=2)
        report = await at.made.pause(2.0)
        tally = report.as_json()["workers"]["w0"]
        assert (tally["residual"], tally["uncounted"]) == (None, [gone.url])
        await at.made.resume()
        assert not left.running
        at.answer_all()
        at.router.forgive()
        await gone.restart()
        await at.until_state("ACTIVE")
        assert [engine.weight_version for engine in at.engines] == ["0", "0"]
        batch = await at.made.take(step=1, groups=2)
        assert len(batch["groups"]) == 2


async def test_an_engine_restarted_under_old_weights_is_updated_first() -> None:
    """A disk update is replayed before the router's engines get traffic again."""
    async with routed() as at:
        await at.made.pause(2.0)
        await at.made.service.update_weights(1, {"kind": "disk", "path": "/weights"})
        await at.made.resume()
        await at.made.push(2)
        await at.made.until(lambda: sum(engine.running for engine in at.engines) == 2, "both run")
        await at.engines[0].kill()
        await at.until_state("RECOVERING", at.engines[0].url)
        at.engines[1].release(tokens=3)
        await at.engines[0].restart()
        at.router.forgive()
        await at.until_state("ACTIVE")
        assert [engine.weight_version for engine in at.engines] == ["1", "1"]


async def test_an_answer_under_other_weights_is_refused() -> None:
    """One that was restarted between two looks answers as what it is: it is not taken for what it should be."""
    async with routed() as at:
        await at.made.push(2)
        await at.made.until(lambda: sum(engine.running for engine in at.engines) == 2, "both run")
        at.engines[0].weight_version = "default"
        at.engines[0].release(tokens=3)
        await at.until_state("ACTIVE")
        at.engines[1].release(tokens=3)
        await at.made.until(lambda: sum(engine.running for engine in at.engines) == 1, "the refused one runs again")
        for engine in at.engines:
            engine.release(tokens=3)
        batch = await at.made.take(groups=2)
        versions = [s["weight_versions"] for group in batch["groups"] for s in group["samples"]]
        assert versions == [[{"version": 0, "start": 0, "end": 3}]] * 2


async def test_requests_that_hang_at_an_engine_that_is_gone_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """P19: its connections were not broken: after a few looks in vain they are, and nobody waits a full timeout."""
    monkeypatch.setattr(breaker, "BASE_S", 0.01)
    async with routed() as at:
        gone, left = at.engines
        await at.made.push(2)
        await at.made.until(lambda: gone.running == left.running == 1, "both run")
        gone.script("/ping", Reset(), times=None)
        gone.script("/model_info", Reset(), times=None)
        await gone.refuse()
        await at.until_state("RECOVERING", gone.url)
        await at.made.until(lambda: not at.worker["in_flight"], "ended")
        assert at.made.groups("failed") == 0
        gone.heal()
        at.answer_all()
        await gone.listen()
        await at.made.take(groups=2)


async def test_no_weights_move_while_an_engine_is_gone() -> None:
    """P24: the update says why it reached nobody, and the engine that is there keeps what it has."""
    async with routed() as at:
        await at.engines[0].kill()
        await at.until_state("RECOVERING", at.engines[0].url)
        await at.made.pause(2.0)
        with pytest.raises(NotNow) as raised:
            await at.made.service.update_weights(1, {"kind": "disk", "path": "/weights"})
        assert at.engines[0].url in str(raised.value.detail)
        assert at.engines[1].weight_version == "0"


async def test_a_freeze_is_confirmed_by_all_or_by_none() -> None:
    """An engine that does not freeze has the whole worker climb the abort ladder; nobody is left frozen."""
    async with routed() as at:
        await at.made.push(4)
        for engine in at.engines:
            await engine.wait_running(2)
        report = await at.made.pause(2.0, mode="keep")
        assert report.clean
        assert at.worker["frozen"]
        assert [engine.frozen for engine in at.engines] == [2, 2]
        await at.made.resume()
        await at.made.until(lambda: not at.worker["frozen"], "goes on")
        at.engines[1].script("/pause_generation", Status(500), times=None)
        report = await at.made.pause(2.0, mode="keep")
        assert report.clean
        assert report.as_json()["workers"]["w0"]["residual"] == 0
        assert not any(engine.frozen or engine.running for engine in at.engines)


async def test_the_router_dies_and_comes_back() -> None:
    """Its requests end and are made again; its engines, which are idle then, are not blamed."""
    async with routed() as at:
        await at.made.push(2)
        await at.made.until(lambda: sum(engine.running for engine in at.engines) == 2, "both run")
        await at.router.stop()
        await at.made.until(lambda: at.worker["state"] != "ACTIVE", "out of traffic")
        await at.made.until(lambda: not any(engine.running for engine in at.engines), "the engines felt it")
        at.answer_all()
        await at.router.start()
        await at.until_state("ACTIVE")
        await at.made.take(groups=2)


async def test_engines_with_different_weights_get_no_traffic() -> None:
    """Nobody can say which of the two the fleet is at: both are named."""
    async with routed("3", "5", ready=False) as at:
        await at.until_state("QUARANTINED", f"{at.engines[0].url} reports 3, {at.engines[1].url} reports 5")
        assert [engine.weight_version for engine in at.engines] == ["3", "5"]


async def test_a_router_that_sends_elsewhere_as_well_is_refused() -> None:
    """An engine that is not listed would be neither stopped nor updated."""
    async with FakeSGLang() as a, FakeSGLang() as b, FakeRouter([a.url, b.url]) as router:
        worker = {"url": router.url, "engines": [a.url]}
        async with stage(worker, ready=False) as made:
            await made.until(lambda: made.worker().state is WorkerState.RECOVERING, "refused")
            assert f"it sends to 2 engines, and 1 are listed: not {b.url}" in made.worker().reason
            router.urls.remove(b.url)
            await made.until(lambda: made.worker().state is WorkerState.ACTIVE, "in traffic")
            router.urls.append(b.url)
            await made.until(lambda: made.worker().state is WorkerState.RECOVERING, "found out by a ping")


async def test_an_engine_that_is_called_a_router_is_refused() -> None:
    """What it is sent would run where no abort goes; a router that keeps its list to itself is let in."""  # P35
    async with FakeSGLang() as a, FakeSGLang() as b, HttpTransport() as transport:
        failed = (await ask_engines(make_config({"url": a.url, "engines": [b.url]}), transport))["w0"]
        assert isinstance(failed, WorkerFailure)
        assert (failed.kind, a.url in failed.message, "`engines`" in failed.message) == ("unfit", True, True)
        async with FakeRouter([b.url]) as router:
            router.lists = False
            found = (await ask_engines(make_config({"url": router.url, "engines": [b.url]}), transport))["w0"]
            assert isinstance(found, EngineProfile)


async def test_what_the_router_would_drop_is_refused_by_name() -> None:
    """Routed experts do not pass: asking for them fails the sample in words, instead of being forgotten."""
    async with routed(producer={"max_attempts": 1}) as at:
        line = lines(1)[0] | {"engine_extra": {"return_routed_experts": True}}
        await at.made.push([line])
        await at.made.until(lambda: at.made.groups("failed") == 1, "failed")
        assert "return_routed_experts" in str(at.made.parts.tally.last_failure)
        assert at.worker["state"] == "ACTIVE"


async def test_preflight_looks_behind_the_router() -> None:
    """P35: every engine is asked itself, and the one that does not answer is named."""
    async with FakeSGLang() as a, FakeSGLang() as b, FakeRouter([a.url, b.url]) as router, HttpTransport() as transport:
        config = make_config({"url": router.url, "engines": [a.url, b.url]})
        found = (await ask_engines(config, transport))["w0"]
        assert isinstance(found, EngineProfile)
        await b.kill()
        failed = (await ask_engines(config, transport))["w0"]
        assert isinstance(failed, WorkerFailure)
        assert failed.kind == "incomplete"
        assert b.url in str(failed)
        assert a.url not in str(failed)


async def test_an_engine_of_a_router_is_no_worker_of_its_own() -> None:
    """Two owners would abort each other's requests; the same by another name for this machine."""
    async with routed() as at:
        for url in (at.engines[0].url, at.engines[0].url.replace("127.0.0.1", "localhost")):
            with pytest.raises(Conflict):
                await at.made.service.add_worker(WorkerConfig(url=url))
        nobody = "http://127.0.0.1:9"
        for engines in ((nobody,), ("http://127.0.0.1:7", "http://localhost:7")):  # nor one engine twice in one list
            with pytest.raises(Conflict):
                await at.made.service.add_worker(WorkerConfig(url=nobody, engines=engines))


@pytest.mark.parametrize(
    ("workers", "path", "words"),
    [
        ([{"url": "http://r", "engines": []}], "workers.0.engines", "list the engines behind the router"),
        ([{"url": "http://r", "engines": ["x"]}], "workers.0.engines", "expected http://"),
        ([{"url": "http://r", "engines": ["http://a", "http://a/"]}], "workers.0.engines.1", "already engine 0"),
        ([{"url": "http://r", "engines": ["http://r"]}], "workers.0.engines.0", "already worker 0"),
        (
            [{"url": "http://r", "engines": ["http://a"]}, {"url": "http://a"}],
            "workers.0.engines.0",
            "already worker 1",
        ),
    ],
)
def test_bad_engines_are_refused_with_their_path(workers: list[dict[str, Any]], path: str, words: str) -> None:
    """P35: one line with the path of the field."""
    with pytest.raises(ConfigError) as raised:
        make_config(*workers)
    [problem] = raised.value.problems
    assert problem.path == path
    assert words in problem.message


def test_sampling_that_a_router_would_drop_is_refused_at_start() -> None:
    """P35: the setting, and the router that would forget it."""
    config = make_config({"url": "http://r", "engines": ["http://a"]}, sampling={"extra": {"logit_bias": {"1": 2.0}}})
    with pytest.raises(ConfigError) as raised:
        prepare(config)
    [problem] = raised.value.problems
    assert (problem.path, problem.message) == ("tasks.0.sampling.extra", "http://r: the router drops logit_bias")
    prepare(make_config("http://a", sampling={"extra": {"logit_bias": {"1": 2.0}}}))


def test_a_router_is_for_sglang() -> None:
    """P35: another dialect beside `engines` is refused, not ignored."""
    with pytest.raises(ConfigError) as raised:
        make_config({"url": "http://r", "engines": ["http://a"], "dialect": "vllm"})
    assert {problem.path for problem in raised.value.problems} <= {"workers.0.engines", "workers.0.dialect"}


async def test_a_canary_behind_it_goes_no_further_once_a_pause_climbs() -> None:
    """P9: the second engine is asked for no token after its own count may have said that it is idle."""
    async with routed() as at:
        supervisor, worker = at.made.parts.supervisor, at.made.worker()
        works = at.made.start(supervisor._canary.sing(worker))
        await at.engines[0].wait_running(1)
        supervisor.hold()
        at.engines[0].release(tokens=1)
        assert await works is False
        assert at.engines[1].requests == []
        supervisor.release()


async def test_a_launched_engine_gets_no_port_of_an_engine_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while that one is down: it will want it back."""
    async with routed() as at:
        taken: set[int | None] = set()

        def chosen(before: int | None, others: set[int | None], *_: Any) -> int:
            taken.update(others)
            return before or 20_000

        monkeypatch.setattr(launching, "choose_port", chosen)
        at.made.parts.launching.place(LaunchConfig(command=("engine", "{port}")))
        assert taken == {at.router.port, *(engine.port for engine in at.engines)}
