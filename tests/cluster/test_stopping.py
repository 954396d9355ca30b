"""The promises about stopping, with the service in an actor and four engines on four nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest

from tests.cluster.agent import Agent
from tests.cluster.figures import show
from tests.cluster.leftovers import until
from tests.cluster.nodes import Nodes
from tests.cluster.processes import actor_pid, held_by
from tests.cluster.site import DEADLINE_S, Site, config_of, four, started_site
from tests.cluster.trainer import Trainer

FAULTS = {"black_hole": True, "late": True, "deaf": True, "slow_loris": False, "reset": False, "status:500": False}
"""What an engine may do, and whether its requests are left behind by a pause."""


@pytest.fixture(scope="module")
def service(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start the service, once for this file."""
    ways = tmp_path_factory.mktemp("ways")
    with started_site("stopping", ways, config_of(ways, *four())) as site:
        assert len({engine.address for engine in site.engines}) == 4
        assert nodes.address
        yield site


@pytest.fixture
def site(service: Site) -> Iterator[Site]:
    """Give a test the service; at its end all it was given is consumed, so nothing was lost."""
    service.hold()
    yield service
    service.settle()


@pytest.mark.timeout(120)
def test_keep_freezes_what_runs_and_nothing_is_made_twice(site: Site) -> None:
    """In mode keep every engine is frozen; nothing is aborted or sent again, and all of it ends after."""  # P8 P9 P10
    # Before the tests that silence engines: a command to go on may arrive there for 30 s, and no freeze is trusted.
    site.fill()
    begun = [engine.seen() for engine in site.engines]
    report = site.pause(20.0, mode="keep")  # an engine has a part of it to confirm: two seconds at most
    assert (report["mode"], report["clean"], report["abandoned"]) == ("keep", True, [])
    held = [engine.running() for engine in site.engines]
    assert sum(held) == 64
    assert [tally["in_flight"] for tally in report["workers"].values()] == held
    for engine in site.engines:
        engine.command(delay_s=0.0)  # whatever is not frozen is answered now
    site.put(4)
    assert all(engine.seen()["frozen"] for engine in site.engines)
    assert [engine.running() for engine in site.engines] == held
    assert site.groups("ready") == 0
    site.resume()
    batch = site.take(32)
    assert {len(sample["response_ids"]) for group in batch["groups"] for sample in group["samples"]} == {16}
    for engine, before in zip(site.engines, begun, strict=True):
        after = engine.seen()
        assert (after["frozen"], after["aborted_at"]) == (False, before["aborted_at"])
        assert 12 not in after["prompts"][len(before["prompts"]) :], "a request that was sent again brings 8 tokens"


@pytest.mark.short
@pytest.mark.timeout(120)
def test_a_clean_pause_leaves_every_engine_idle(site: Site) -> None:
    """Every engine is idle by its own count, no more is sent, and what came before is kept."""  # P8 P9 P10
    site.fill()
    report = site.pause()
    assert report["clean"]
    assert [tally["residual"] for tally in report["workers"].values()] == [0, 0, 0, 0]
    begun = [len(engine.seen()["prompts"]) for engine in site.engines]
    site.put(4)
    assert [engine.running() for engine in site.engines] == [0, 0, 0, 0]
    assert [len(engine.seen()["prompts"]) for engine in site.engines] == begun
    assert site.groups("in_flight") == 0
    site.resume()
    for engine, before in zip(site.engines, begun, strict=True):
        engine.running(least=1)
        carried = engine.seen()["prompts"][before:]
        assert {12, 4} >= set(map(int, carried)), "a continued sample brings its 8 tokens, a new one none"
    assert any(12 in engine.seen()["prompts"] for engine in site.engines)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [*FAULTS, "sigstop", "sigkill"])
def test_a_pause_under_a_fault_of_one_engine(site: Site, fault: str) -> None:
    """In time; what is left is named at that engine, and nowhere else; the others are idle."""  # P8 P9 P12
    struck, *others = site.engines
    site.fill()
    if fault == "sigstop":
        struck.freeze()
    elif fault == "sigkill":
        struck.kill()
    else:
        struck.command(fault=fault)
    report = site.pause()
    left = FAULTS.get(fault, fault == "sigstop")
    assert {item["worker"] for item in report["abandoned"]} == ({struck.worker_id} if left else set())
    assert report["clean"] is not left
    for engine in others:
        assert report["workers"][engine.worker_id]["abandoned"] == 0
        assert report["workers"][engine.worker_id]["residual"] == 0
        assert engine.running() == 0
    site.resume()
    for engine in others:
        engine.command(delay_s=0.0)
    site.take(4)


@pytest.mark.short
@pytest.mark.timeout(120)
def test_a_pause_under_everything_at_once(site: Site) -> None:
    """Black hole, lost aborts, a frozen engine, deaf judges, tasks that cling: in time, all named."""  # P8 P12
    hole, deaf, frozen, well = site.engines
    site.flag("tool", "hold", "deaf")
    site.put(4, "clings")
    site.put(4, "t")
    for engine in site.engines:
        engine.command(delay_s=0.0)
    until(lambda: len(site.said("clung")) == 8, "every task clings")
    until(lambda: len(site.said("judged")) == 8, "every judge hangs")
    site.hold()
    site.fill(24)
    hole.command(fault="black_hole")
    deaf.command(fault="deaf")
    frozen.freeze()
    report = site.pause()
    left = [item["worker"] for item in report["abandoned"]]
    assert set(left) == {None, hole.worker_id, deaf.worker_id, frozen.worker_id}
    assert left.count(None) >= 8
    assert report["workers"][well.worker_id]["residual"] == 0
    assert [rung["name"] for rung in report["rungs"]] == ["gate", "abort", "judges", "http", "tasks", "report"]
    states = {worker["id"]: worker["state"] for worker in site.status()["workers"]}
    assert states[well.worker_id] == "ACTIVE"
    assert {states[engine.worker_id] for engine in (hole, deaf, frozen)} == {"QUARANTINED"}


@pytest.mark.timeout(120)
def test_what_was_received_is_kept_through_pauses(site: Site) -> None:
    """A sample that was cut twice brings the tokens of both times to its third engine."""  # P10
    site.fill(8)
    for _ in range(2):
        assert site.pause()["clean"]
        site.resume()
        for engine in site.engines:
            engine.running(least=1)
    until(lambda: any(20 in engine.seen()["prompts"] for engine in site.engines), "4 of the prompt, and twice 8")
    for engine in site.engines:
        engine.command(delay_s=0.0)
    batch = site.take(8)
    lengths = {len(sample["response_ids"]) for group in batch["groups"] for sample in group["samples"]}
    assert lengths == {8 + 8 + 16}


@pytest.mark.short
@pytest.mark.timeout(120)
def test_parked_agents_go_on_where_they_were(site: Site) -> None:
    """An agent in its own tool is parked, listed, and not begun again."""  # P10
    site.flag("tool")
    for engine in site.engines:
        engine.command(delay_s=0.0)
    site.put(4, "tool")
    until(lambda: len(site.said("used")) == 8, "every loop uses its tool")
    report = site.pause()
    assert report["clean"]
    assert len(report["parked"]) == 8
    assert site.status()["lanes"]["train"]["parked"] == 8
    site.unflag("tool")
    site.resume()
    batch = site.take(4)
    assert sorted(report["parked"]) == sorted(s["sample_id"] for group in batch["groups"] for s in group["samples"])
    assert len(site.said("ran")) == 8


@pytest.mark.short
@pytest.mark.timeout(120)
def test_two_callers_pause_at_once(site: Site) -> None:
    """A second pause, from another process, joins the first: one ticket, the earlier deadline."""  # P11
    import ray

    other: Any = ray.remote(Trainer).options(num_cpus=0).remote("stopping")
    assert ray.get(other.ask.remote("status"), timeout=30)["state"] == "running"
    site.fill()
    site.engines[0].command(fault="black_hole")
    ticket = site.status()["ticket"]
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(site.call, "pause", deadline_s=20.0, mode="wait")
        until(lambda: site.status()["state"] == "pausing", "the first is under way")
        joined = other.ask.remote("pause", deadline_s=DEADLINE_S, if_ticket=ticket)
        resumed = other.ask.remote("resume", ticket=ticket + 1)
        assert ray.get(joined, timeout=30)["ticket"] == first.result(30)["ticket"] == ticket + 1
    assert time.monotonic() - began < DEADLINE_S + 2.0
    assert ray.get(resumed, timeout=30)["state"] == "running", "a resume during a pause waits for its report"
    ray.kill(other)


@pytest.mark.short
@pytest.mark.timeout(120)
def test_a_late_pause_with_an_old_ticket_changes_nothing(site: Site) -> None:
    """pause; pause; resume; late pause with an old if_ticket: it is refused, as a Conflict, and all runs on."""  # P11
    from rollout_svc.errors import Conflict

    site.fill()
    old = site.status()["ticket"]
    first = site.pause()
    assert site.pause()["ticket"] == first["ticket"] == old + 1
    site.resume()
    with pytest.raises(Conflict):
        site.pause(if_ticket=old)
    with pytest.raises(Conflict):
        site.resume(ticket=old)
    assert site.status()["state"] == "running"


@pytest.mark.timeout(120)
def test_a_judge_observes_a_pause_and_comes_too_late(site: Site) -> None:
    """A judge that is deaf to its cancellation is fenced: its late word counts for nothing."""  # P13
    for engine in site.engines:
        engine.command(delay_s=0.0)
    site.flag("hold", "deaf")
    site.put(4)
    until(lambda: len(site.said("judged")) == 8, "every judge hangs")
    report = site.pause()
    assert site.groups("aborted") == 4
    assert report["ledger"]["samples"]["aborted"] == 8
    assert len(site.said("judged")) == 8, "no judge starts after the gate closed"
    site.unflag("deaf", "hold")
    site.resume()
    batch = site.take(4)
    assert {sample["reward"] for group in batch["groups"] for sample in group["samples"]} == {1.0}
    assert len(site.said("judged")) == 16


@pytest.mark.timeout(120)
def test_a_cancelled_call_ends_and_its_slot_is_free(site: Site) -> None:
    """A take or a pause that its caller cancels is over; the service goes on, and can be paused again."""  # P14
    import ray
    from ray.exceptions import TaskCancelledError

    site.fill()
    taking = site.rollout.take_batch.remote(0, 64, 60.0)
    until(lambda: site.status()["state"] == "running", "it runs")
    ray.cancel(taking)
    with pytest.raises(TaskCancelledError):
        ray.get(taking, timeout=10)
    site.engines[0].command(fault="deaf")
    pausing = site.rollout.pause.remote(deadline_s=DEADLINE_S)
    until(lambda: site.status()["state"] == "pausing", "the pause is under way")
    ray.cancel(pausing)
    with pytest.raises(TaskCancelledError):
        ray.get(pausing, timeout=10)
    site.engines[0].command(fault="none")
    assert site.pause()["clean"]


@pytest.mark.short
@pytest.mark.timeout(120)
def test_another_lane_runs_on(site: Site) -> None:
    """Aborting the lane of training leaves an evaluation running; it is answered while training is paused."""  # P15
    asked = site.rollout.evaluate.remote("t", [{"input_ids": [1, 2]}, {"input_ids": [3]}], timeout_s=30.0)
    until(lambda: site.status()["lanes"]["eval"]["in_flight"] == 2, "it runs")
    site.fill()
    report = site.pause(lanes=["train"])
    assert report["clean"]
    lanes = site.status()["lanes"]
    assert (lanes["train"]["in_flight"], lanes["eval"]["in_flight"], lanes["eval"]["open"]) == (0, 2, True)
    assert sum(engine.running() for engine in site.engines) == 2
    for engine in site.engines:
        engine.command(delay_s=0.0)
    import ray

    answer = ray.get(asked, timeout=30)
    assert {sample["status"] for group in answer["groups"] for sample in group["samples"]} <= {"COMPLETED", "CONSUMED"}


@pytest.mark.short
@pytest.mark.timeout(120)
def test_a_pause_goes_past_64_waiting_takes(site: Site) -> None:
    """With every data connection busy and 64 takes waiting, a call is answered and aborts go out at once."""  # P16
    import ray

    site.fill()
    takes = [site.rollout.take_batch.remote(0, 64, 60.0, []) for _ in range(64)]
    took = []
    for _ in range(20):
        began = time.monotonic()
        site.status()
        took.append(time.monotonic() - began)
    began = time.monotonic()
    report = site.pause()
    assert report["clean"]
    aborts = [min(at for at in engine.seen()["aborted_at"] if at > began) - began for engine in site.engines]
    show("status beside 64 takes, ms", round(1e3 * median(took), 1))
    show("first abort at each engine, ms", [round(1e3 * at) for at in aborts])
    assert median(took) < 0.1
    assert max(aborts) < 0.25
    for take in takes:
        ray.cancel(take)
    ray.wait(takes, num_returns=64, timeout=20)


@pytest.mark.short
@pytest.mark.timeout(120)
def test_aborts_end_with_their_pause(site: Site) -> None:
    """An engine that loses aborts is asked ever more slowly; after the resume nobody is."""  # P17
    struck = site.engines[0]
    site.fill()
    before = [len(engine.seen()["aborted_at"]) for engine in site.engines]
    struck.command(fault="deaf")
    held = struck.running()
    report = site.pause()
    assert not report["clean"]
    site.resume()
    resumed = time.monotonic()
    sent = len(struck.seen()["aborted_at"]) - before[0]
    assert sent <= 8 * held, "a few rounds, by request id at most"
    struck.heal()
    until(lambda: site.status()["workers"][0]["state"] == "ACTIVE", "its quarantine ends")
    for engine in site.engines[1:]:
        assert not [at for at in engine.seen()["aborted_at"] if at > resumed], "no stale abort after the resume"


@pytest.mark.short
@pytest.mark.timeout(120)
def test_wait_lets_what_runs_finish(site: Site) -> None:
    """In mode wait running requests finish and count; nothing new is sent."""  # P8 P9
    site.fill()
    begun = sum(len(engine.seen()["prompts"]) for engine in site.engines)
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(site.pause, 4.0, mode="wait")
        until(lambda: site.status()["state"] == "pausing", "it waits")
        for engine in site.engines:
            engine.command(delay_s=0.0)
        report = pausing.result(30)
    assert (report["mode"], report["clean"]) == ("wait", True)
    assert sum(tally["late"] for tally in report["workers"].values()) == 0
    assert sum(len(engine.seen()["prompts"]) for engine in site.engines) == begun
    assert site.groups("aborted") == 0
    assert site.groups("ready") > 0


@pytest.mark.timeout(120)
def test_an_agent_over_http_never_sees_a_cut_turn(site: Site) -> None:
    """Its turn is answered whole, after the pause; one that it asks for meanwhile is refused with 503."""  # P15
    url: str = site.call("ready")
    site.give([{"id": "chat", "messages": [{"role": "user", "content": "hi"}]}], "chat")
    first, second = Agent(url), Agent(url)
    with ThreadPoolExecutor() as pool:
        going = pool.submit(first.turn)
        until(lambda: sum(engine.running() for engine in site.engines) == 1, "its turn runs")
        report = site.pause()
        assert report["clean"]
        assert len(report["parked"]) == 2, "the one whose turn was cut, and the one that has not asked yet"
        status, answer, again_s = second.turn()
        assert (status, again_s) == (503, "1"), answer
        assert "paused" in answer["error"]["message"]
        assert not going.done(), "a cut turn is no answer"
        site.resume()
        for engine in site.engines:
            engine.command(delay_s=0.0)
        status, answer, _ = going.result(30)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8 + 16)
    status, answer, _ = second.turn()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 16)
    first.end()
    second.end()
    [group] = site.take(1)["groups"]
    assert sorted(len(sample["response_ids"]) for sample in group["samples"]) == [16, 8 + 16]


@pytest.mark.timeout(300)
def test_a_hundred_flaps_leave_nothing_behind(site: Site) -> None:
    """100 pauses and resumes under load: no thread, file, object or memory more."""  # P11
    from ray.util.state import list_objects

    for engine in site.engines:
        engine.command(delay_s=0.02)
    site.put(64)
    pid = actor_pid("stopping")
    marks = []
    for number in range(100):
        assert site.pause()["clean"]
        if number % 10 == 9:
            marks.append(held_by(pid))
        site.resume()
        if number % 20 == 19:
            site.take(8)
    show("rss MB, threads, files of the actor", marks)
    rss, threads, files = zip(*marks, strict=True)
    assert threads[-1] <= threads[0]
    assert files[-1] <= files[0] + 16, "connections of the data lane come and go"
    assert rss[-1] - rss[4] <= 8.0, "MB over 50 flaps: a call left behind is several pages"
    assert len(list_objects(limit=1000)) <= 16
