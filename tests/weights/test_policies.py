"""An update that fails anywhere, in any way, under each policy: one version for the fleet, and nobody who lies."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.config import WorkerConfig
from rollout_svc.engines import Call, Endpoint, EngineInfo, EngineProfile, Reply
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.errors import NotNow
from rollout_svc.weights.fleet import Source
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.staging import Publisher
from rollout_svc.weights.update import OnFailure
from rollout_svc.workers.making import make_worker
from rollout_svc.workers.worker import WorkerState
from tests.support.fallible import PUBLISHER, FallibleFleet
from tests.support.virtual import virtual

SETTLED_S = 200.0  # whatever was late has arrived
ABLE = ("disk", "shm", "flush", "set_version", "weight_version")
POLICIES = get_args(OnFailure)
SHM = Source("shm", publisher=Publisher(Endpoint(PUBLISHER, None, None), "shm"))


async def updated(made: FallibleFleet, version: int, kind: str) -> tuple[bool, dict[str, Any]]:
    """Update, wait until nothing is on its way, and check what has to hold after any; returns whether it was one."""
    made.published += 1
    source = SHM if kind == "shm" else Source("disk", f"/weights/v{made.published}")
    policy, before = made.updater._on_failure, made.fleet.version
    there = [worker for worker in made.workers.values() if worker.state is WorkerState.ACTIVE]
    loop = asyncio.get_running_loop()
    try:
        record = await made.updater.update(version, source, Phases(loop.time), since=loop.time())
        done = True
    except NotNow as failure:
        record, done = failure.detail, False
    await asyncio.sleep(SETTLED_S)
    results, fleet = record["workers"], made.fleet.version
    if any(told["ok"] for told in results.values()):
        made.has = made.published
    assert record["version"] == fleet
    assert results.keys() == made.workers.keys()
    for worker in made.workers.values():
        engine = made.engine(worker)
        told = results[worker.worker_id]
        if worker.state is WorkerState.ACTIVE and not engine.dead:
            assert (engine.weights, engine.cached) == (made.has, made.has)
            assert (engine.label, worker.version) == (str(fleet), fleet)
        if told["ok"]:
            assert (engine.weights, engine.cached, engine.label) == (made.published, made.published, str(version))
        elif fleet == version != before:
            assert worker.state is not WorkerState.ACTIVE
        assert told["ok"] or told.get("error") or told.get("skipped")
    failed = [worker for worker in there if not results[worker.worker_id]["ok"]]
    assert done == (made.has == made.published and (not failed or policy == "quarantine"))
    assert fleet in (before, version)
    if failed and policy == "rollback":
        assert fleet == before
        assert not any(told["ok"] for told in results.values())
    return done, results


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data(), count=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
@virtual
async def test_after_any_update_the_fleet_is_at_one_version(data: st.DataObject, count: int, policy: OnFailure) -> None:
    """P24 P25: whoever is in traffic has the fleet's weights, says so, and has no older cache; no failure is hidden."""
    faults = st.sampled_from(["ok"] * 8 + ["refused", "lost", "late", "dead"])
    calm = 0

    def draw(url: str, path: str) -> str:
        nonlocal calm
        fault = "ok" if calm else data.draw(faults, f"{url}{path}")
        return "ok" if path == "/model_info" and fault == "refused" else fault

    made = FallibleFleet(count, policy, draw)
    for _ in range(data.draw(st.integers(1, 4), "updates")):
        step = data.draw(st.sampled_from([1, 1, 1, 0, -1]), "step")  # not greater: forced
        kind = data.draw(st.sampled_from(["disk", "shm"]), "kind")
        await updated(made, max(0, made.fleet.version + step), kind)
    calm = 1  # nothing fails any more: whoever lives has a way back
    if any(not engine.dead for engine in made.engines.values()):
        done, results = await updated(made, 9, "disk")
        assert done
        assert all(results[w.worker_id]["ok"] for w in made.workers.values() if not made.engine(w).dead)


def failing(*where: tuple[str, str, str]) -> Any:
    """Draw these faults, once each: engine, path, fault."""
    left = list(where)

    def draw(url: str, path: str) -> str:
        for one in left:
            if one[:2] == (url, path):
                left.remove(one)
                return one[2]
        return "ok"

    return draw


@pytest.mark.parametrize(
    ("policy", "fleet", "weights", "states"),
    [
        ("stop", 1, [1, 0], ["ACTIVE", "QUARANTINED"]),
        ("rollback", 0, [0, 0], ["ACTIVE", "ACTIVE"]),
        ("quarantine", 1, [1, 0], ["ACTIVE", "QUARANTINED"]),
    ],
)
@virtual
async def test_one_that_refuses_at_the_end(policy: OnFailure, fleet: int, weights: Any, states: Any) -> None:
    """P24: it staged all, and did not swap: the other one keeps the new weights, or swaps the old ones in again."""
    made = FallibleFleet(2, policy, failing(("http://e1", "/end_weight_update", "refused")))
    done, results = await updated(made, 1, "shm")
    assert (done, made.fleet.version) == (policy == "quarantine", fleet)
    assert [engine.weights for engine in made.engines.values()] == weights
    assert [str(worker.state) for worker in made.workers.values()] == states
    assert ("it was taken back" in results["w0"].get("error", "")) == (policy == "rollback")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["/begin_weight_update", "/update_weights_from_shared_memory"])
@virtual
async def test_one_that_dies_while_it_is_handed_weights(policy: OnFailure, path: str) -> None:
    """P24: it ends the update for all, and nothing has changed; or the others go on without it, to the end."""
    made = FallibleFleet(2, policy, failing(("http://e1", path, "dead")))
    done, results = await updated(made, 1, "shm")
    there = made.engines["http://e0"]
    expected = (True, 1, True) if policy == "quarantine" else (False, 0, False)
    assert (done, there.weights, results["w0"]["ok"]) == expected
    assert there.staged is None
    assert made.workers["w0"].state is WorkerState.ACTIVE


@pytest.mark.parametrize("policy", POLICIES)
@virtual
async def test_one_that_dies_between_the_last_bucket_and_the_end(policy: OnFailure) -> None:
    """P24: the version the fleet is at afterwards is the policy's, and the dead one is named."""
    made = FallibleFleet(2, policy, failing(("http://e1", "/end_weight_update", "dead")))
    done, results = await updated(made, 1, "shm")
    assert (done, made.fleet.version) == (policy == "quarantine", 0 if policy == "rollback" else 1)
    assert not results["w1"]["ok"]
    assert made.workers["w1"].state is WorkerState.DEAD


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["/begin", "/next"])
@virtual
async def test_a_publisher_that_dies_changes_nothing(policy: OnFailure, path: str) -> None:
    """P24: under every policy: all have what they had, nothing staged, all in traffic."""
    made = FallibleFleet(2, policy, failing((PUBLISHER, path, "dead")))
    done, results = await updated(made, 1, "shm")
    assert (done, made.fleet.version) == (False, 0)
    assert all("the publisher" in told["error"] for told in results.values())
    assert [(e.weights, e.staged) for e in made.engines.values()] == [(0, None)] * 2
    assert {worker.state for worker in made.workers.values()} == {WorkerState.ACTIVE}


@virtual
async def test_a_rollback_loads_what_was_loaded_before() -> None:
    """P24: from disk the version before is its path; what came from nowhere cannot be had again, and is out."""
    made = FallibleFleet(3, "rollback", failing(("http://e2", "/update_weights_from_disk", "ok")))
    assert (await updated(made, 1, "disk"))[0]
    made.draw = failing(("http://e2", "/update_weights_from_disk", "refused"))
    assert not (await updated(made, 2, "disk"))[0]
    assert [engine.weights for engine in made.engines.values()] == [1, 1, 1]
    assert {worker.state for worker in made.workers.values()} == {WorkerState.ACTIVE}
    made = FallibleFleet(2, "rollback", failing(("http://e1", "/update_weights_from_disk", "refused")))
    done, results = await updated(made, 1, "disk")
    assert (done, made.fleet.version) == (False, 0)
    assert [str(worker.state) for worker in made.workers.values()] == ["QUARANTINED", "ACTIVE"]
    assert "it could not be taken back: cannot: the weights of version 0 were there from the start" in str(results)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/end_weight_update"])
@virtual
async def test_weights_that_may_still_arrive_keep_their_engine_out(policy: OnFailure, path: str) -> None:
    """P24: it did not answer, and reports what it had: nobody generates there, and ours is started again."""
    made = FallibleFleet(1, policy, failing(("http://e0", path, "late")))
    done, _ = await updated(made, 1, "shm" if path == "/end_weight_update" else "disk")
    worker = made.workers["w0"]
    assert (done, made.fleet.version, worker.state) == (False, 0, WorkerState.QUARANTINED)
    assert "may still be loaded" in worker.reason
    assert made.restarted == ["w0"]


@virtual
async def test_one_that_swapped_and_was_not_asked_has_an_old_cache() -> None:
    """P25: its version could not be confirmed, so nothing was flushed: out, however well it says it is later."""
    made = FallibleFleet(2, "stop", failing(("http://e1", "/model_info", "lost")))
    done, results = await updated(made, 1, "shm")
    assert not done
    assert (results["w1"]["version"], results["w1"]["flushed"]) == (1, False)
    assert made.workers["w1"].state is WorkerState.QUARANTINED


@virtual
async def test_one_that_swapped_back_and_did_not_answer_has_an_old_cache() -> None:
    """P24 P25: its label is the right one again, and that is no proof of anything else: out."""
    faults = (("http://e1", "/end_weight_update", "refused"), ("http://e0", "/revert_weight_update", "lost"))
    made = FallibleFleet(2, "rollback", failing(*faults))
    done, results = await updated(made, 1, "shm")
    assert (done, made.engines["http://e0"].label) == (False, "0")
    assert "could not be taken back" in results["w0"]["error"]
    assert [str(worker.state) for worker in made.workers.values()] == ["QUARANTINED", "ACTIVE"]


@pytest.mark.parametrize("kind", ["disk", "shm"])
@virtual
async def test_the_same_version_brought_again_is_not_taken_for_there(kind: str) -> None:
    """P24: whoever refuses it reports that very version, and has other weights of it: out."""
    path = "/update_weights_from_disk" if kind == "disk" else "/end_weight_update"
    made = FallibleFleet(2, "stop", failing())
    assert (await updated(made, 1, "disk"))[0]
    made.draw = failing(("http://e1", path, "refused"))
    done, _ = await updated(made, 1, kind)
    assert (done, [str(worker.state) for worker in made.workers.values()]) == (False, ["ACTIVE", "QUARANTINED"])
    assert made.workers["w1"].half_loaded


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["/begin_weight_update", "/update_weights_from_shared_memory"])
@pytest.mark.parametrize("fault", ["refused", "dead"])
@virtual
async def test_one_that_was_out_already_ends_it_for_nobody(policy: OnFailure, path: str, fault: str) -> None:
    """P24: it is brought along where it takes the weights; where it does not, those in traffic have them all."""
    made = FallibleFleet(2, policy, failing(("http://e1", path, fault)))
    made.workers["w1"].put_in_quarantine("version", "it joined later")
    done, results = await updated(made, 1, "shm")
    assert (done, made.fleet.version, results["w0"]) == (True, 1, {"ok": True, "version": 1})
    assert not results["w1"]["ok"]
    assert fault == "dead" or made.engines["http://e1"].staged is None


@pytest.mark.parametrize("policy", POLICIES)
@virtual
async def test_one_that_was_out_already_and_cannot_is_listed(policy: OnFailure) -> None:
    """P24: an engine that knows no such way refuses it for those in traffic only where it is one of them."""
    made = FallibleFleet(2, policy, failing())
    out = made.workers["w1"]
    out.introduce(SGLangDialect(), EngineProfile("sglang", capabilities=("disk", "weight_version"), weight_label="0"))
    out.put_in_quarantine("version", "it joined later")
    done, results = await updated(made, 1, "shm")
    assert (done, made.fleet.version) == (True, 1)
    assert "takes no weights by shm" in results["w1"]["error"]


@pytest.mark.parametrize("kind", ["disk", "shm"])
@virtual
async def test_one_that_is_being_brought_up_is_left_to_that(kind: str) -> None:
    """P24: two loads in one engine at a time make a mix of both under one label; it is brought up again after."""
    made = FallibleFleet(2, "stop", failing())
    assert (await updated(made, 1, "disk"))[0]
    late = made.workers["w1"]
    late.put_in_quarantine("version", "it was away")
    engine = made.engine(late)
    engine.weights, engine.label, engine.cached = 7, "0", 7
    loading, loaded = asyncio.Event(), asyncio.Event()

    async def slow(endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        if endpoint.url == "http://e1" and call.path == "/update_weights_from_disk" and not loaded.is_set():
            loading.set()
            await loaded.wait()
        return await FallibleFleet.control(made, endpoint, call, timeout_s)

    made.control = slow  # type: ignore[method-assign]
    admitting = made.tasks.spawn("admit", made.fleet.admit(late, EngineInfo("0"), lambda: True))
    await loading.wait()
    made.published += 1
    source, now = SHM if kind == "shm" else Source("disk", "/weights/v2"), asyncio.get_running_loop().time
    results = (await made.updater.update(2, source, Phases(now), since=0.0))["workers"]
    assert results["w0"]["ok"]
    assert "skipped" in results["w1"]
    assert (engine.label, engine.staged) == ("0", None)
    loaded.set()
    said = await admitting
    assert (said is None) == (kind == "disk")
    assert (engine.weights, engine.label) == ((2, "2") if kind == "disk" else (1, "1"))


@virtual
async def test_what_is_frozen_stays_so_until_everybody_has_theirs() -> None:
    """P24: one that has the weights may be taken back for another's failure: no pause that joins has it go on."""
    made = FallibleFleet(2, "rollback", failing(("http://e1", "/update_weights_from_disk", "refused")))
    held: list[bool] = []

    async def slow(endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        if endpoint.url == "http://e1" and call.path == "/update_weights_from_disk":
            await asyncio.sleep(1.0)
            held.append(made.workers["w0"].loading)
        return await FallibleFleet.control(made, endpoint, call, timeout_s)

    made.control = slow  # type: ignore[method-assign]
    assert not (await updated(made, 1, "disk"))[0]
    assert held == [True]
    assert not any(worker.loading for worker in made.workers.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["disk", "shm"])
@virtual
async def test_one_of_two_behind_a_router_that_may_load_yet(policy: OnFailure, kind: str) -> None:
    """P24: the other one refuses for certain, both report what they had, and one of them is about to change: out."""
    path = "/update_weights_from_disk" if kind == "disk" else "/end_weight_update"
    made = FallibleFleet(2, policy, failing(("http://e0", path, "late"), ("http://e1", path, "refused")))
    config = WorkerConfig(url="http://router", dialect="sglang", engines=tuple(made.engines))
    worker = make_worker("w0", config, "http://router", made, Random(0))
    worker.introduce(SGLangDialect(), EngineProfile("sglang", capabilities=ABLE, weight_label="0"))
    worker.version = worker.flushed = 0
    worker.become(WorkerState.ACTIVE, "in traffic")
    made.workers = {"w0": worker}
    made.published = 1
    source = SHM if kind == "shm" else Source("disk", "/weights/v1")
    with pytest.raises(NotNow):
        await made.updater.update(1, source, Phases(asyncio.get_running_loop().time), since=0.0)
    assert (made.fleet.version, worker.state, worker.half_loaded) == (0, WorkerState.QUARANTINED, True)
    await asyncio.sleep(SETTLED_S)
    assert [engine.weights for engine in made.engines.values()] == [1, 0]


def noting(made: FallibleFleet, path: str, held: asyncio.Event | None = None) -> list[str]:
    """Note every call of a route from now on, and have each wait for `held`."""
    seen: list[str] = []

    async def noted(endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        if call.path == path:
            seen.append(endpoint.url)
            if held is not None:
                await held.wait()
        return await FallibleFleet.control(made, endpoint, call, timeout_s)

    made.control = noted  # type: ignore[method-assign]
    return seen


@virtual
async def test_an_admission_that_waited_begins_in_no_other_update() -> None:
    """P24: the next update may have begun in the step in which the one it waited for ended."""
    made = FallibleFleet(2, "stop", failing())
    assert (await updated(made, 1, "disk"))[0]
    late = made.workers["w1"]
    late.put_in_quarantine("version", "it was away")
    loads = noting(made, "/update_weights_from_disk")
    with made.fleet.updating():
        admitting = made.tasks.spawn("admit", made.fleet.admit(late, EngineInfo("0"), lambda: True))
        await asyncio.sleep(1.0)
    with made.fleet.updating():
        await asyncio.sleep(1.0)
        assert not loads
    assert await admitting is None
    assert loads == ["http://e1"]


@virtual
async def test_nobody_is_let_in_while_an_update_runs() -> None:
    """P24: it had the fleet's version when it was looked at, and is brought to the next one before it has traffic."""
    made = FallibleFleet(2, "stop", failing())
    assert (await updated(made, 1, "disk"))[0]
    late = made.workers["w1"]
    late.put_in_quarantine("version", "it was away")
    late.flushed, flushed = None, asyncio.Event()
    flushes = noting(made, "/flush_cache", flushed)
    admitting = made.tasks.spawn("admit", made.fleet.admit(late, EngineInfo("1"), lambda: True))
    await asyncio.sleep(1.0)
    assert flushes == ["http://e1"]
    with made.fleet.updating():
        flushed.set()
        await asyncio.sleep(1.0)
        assert not admitting.done()
        made.fleet.became(2, Source("disk", "/weights/v2"))
    assert await admitting is None
    assert (late.version, made.engine(late).weights) == (2, 2)
