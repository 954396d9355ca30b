"""Nodes and engines that are lost: in the middle of a pause, and while all runs; nothing that was received is.

- The fourth engine needs what only a node of the test's own has, so that its node can be lost, and another brought.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.figures import show
from tests.cluster.leftovers import until
from tests.cluster.nodes import HEAD, OTHERS, Nodes
from tests.cluster.processes import host_pid, kill, lives
from tests.cluster.site import DEADLINE_S, Site, chaos, config_of, started_site

MOMENTS = ("before", pytest.param("between", marks=pytest.mark.short), "report")


@contextmanager
def lossy(name: str, nodes: Nodes, ways: Path) -> Iterator[tuple[Site, Any]]:
    """Start a service whose last engine is on a node of its own; gives it and that node."""
    node = nodes.add(spare=1)
    spare = chaos()
    spare["launch"]["resources"] |= {"spare": 1}
    workers = [*(chaos(address) for address in OTHERS), spare]
    try:
        with started_site(name, ways, config_of(ways, *workers)) as site:
            assert site.engines[3].address == node.node_ip_address
            site.hold()
            yield site, node
    finally:
        nodes.lose(node)


@contextmanager
def another(nodes: Nodes, **resources: float) -> Iterator[Any]:
    """Bring a node, and take it away again."""
    node = nodes.add(4, 0, **resources)
    try:
        yield node
    finally:
        nodes.lose(node)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_node_dies_in_the_middle_of_a_pause(nodes: Nodes, tmp_path: Path, moment: str) -> None:
    """In time, with balanced books; tokens are kept, it is named, and its engine runs elsewhere after."""  # P8 P10 P19
    with lossy(f"dies-{moment}", nodes, tmp_path / "ways") as (site, node):
        *well, lost = site.engines
        site.fill(16)
        assert site.pause()["clean"]
        site.resume()
        until(lambda: sum(engine.running() for engine in site.engines) == 32, "all go on, each with 8 tokens")
        lost.command(fault="black_hole" if moment == "report" else "deaf")
        with ThreadPoolExecutor() as pool:
            if moment == "before":
                nodes.lose(node)
            died = began = time.monotonic()
            pausing = pool.submit(site.pause)
            if moment == "between":
                until(lambda: site.status()["state"] == "pausing", "the pause is under way")
            elif moment == "report":
                until(lambda: time.monotonic() - began > 0.92 * DEADLINE_S, "the tenth that is kept for the report")
            if moment != "before":
                nodes.lose(node)
                died = time.monotonic()
            report = pausing.result(30)
        show(f"pause, a node dies: {moment}", {name: round(report[name], 3) for name in ("elapsed_s", "caller_s")})
        assert {item["worker"] for item in report["abandoned"]} <= {lost.worker_id}
        assert report["ledger"]["groups"]["aborted"] == 16
        assert {name for name, tally in report["workers"].items() if tally["in_flight"]} >= {e.worker_id for e in well}
        until(lambda: site.worker(3)["process"]["pid"] is None, "it is known that its process is gone")
        assert site.worker(3)["reason"]
        gone_s = time.monotonic() - died
        site.resume()
        for engine in site.engines[:3]:
            engine.command(delay_s=0.0)
        batch = site.take(16)
        answers = [sample["response_ids"] for group in batch["groups"] for sample in group["samples"]]
        assert min(map(len, answers)) >= 8 + 16, "what the first pause cut was kept"
        with another(nodes, spare=1) as room:
            back_s = until(lambda: site.worker(3)["state"] == "ACTIVE", "it runs elsewhere", 60.0)
            show(f"engine elsewhere, a node dies: {moment}", {"gone_s": round(gone_s, 2), "back_s": round(back_s, 2)})
            site.look()
            assert site.engines[3].address == room.node_ip_address
            site.hold()
            site.fill(16)
            for engine in site.engines:
                engine.command(delay_s=0.0)
            site.take(16)
            site.settle()


@pytest.mark.timeout(180)
def test_an_engines_node_is_lost_while_all_runs(nodes: Nodes, tmp_path: Path) -> None:
    """Its requests move, the trainer waits for none of it, and the engine comes back where there is room."""  # P19
    with lossy("lost", nodes, tmp_path / "ways") as (site, node), another(nodes, spare=1) as room:
        site.fill(16)
        nodes.lose(node)
        began = time.monotonic()
        for engine in site.engines[:3]:
            engine.command(delay_s=0.0)
        site.take(16)
        taken_s = time.monotonic() - began
        until(lambda: site.worker(3)["url"].startswith(f"http://{room.node_ip_address}"), "it is elsewhere", 60.0)
        until(lambda: site.worker(3)["state"] == "ACTIVE", "it is back", 60.0)
        back_s = time.monotonic() - began
        show("node of an engine lost", {"taken_s": round(taken_s, 2), "back_s": round(back_s, 2)})
        site.look()
        site.settle()


@pytest.mark.timeout(180)
def test_a_raylet_that_hangs_takes_its_engine_out(nodes: Nodes, tmp_path: Path) -> None:
    """The cluster gives the node up; its engine is started elsewhere, and of the old one nothing is left."""  # P19
    with lossy("hangs", nodes, tmp_path / "ways") as (site, node), another(nodes, spare=1) as room:
        old = site.engines[3]
        site.fill(16)
        nodes.hang(node)
        try:
            began = time.monotonic()
            elsewhere = f"http://{room.node_ip_address}"
            until(lambda: site.worker(3)["url"].startswith(elsewhere), "it is elsewhere", 60.0)
            until(lambda: site.worker(3)["state"] == "ACTIVE", "it is back", 60.0)
            show("raylet hangs", {"back_s": round(time.monotonic() - began, 2)})
        finally:
            nodes.go_on(node)
        until(lambda: nodes.is_over(node), "the raylet learns that it was given up, and ends")
        until(lambda: not lives(old.pid), "the old engine is gone")
        site.look()
        site.settle()


@pytest.mark.timeout(180)
def test_the_actor_of_an_engine_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """Its engine ends with it, its requests move, and both are started again."""  # P19
    ways = tmp_path / "ways"
    with started_site("actor-killed", ways, config_of(ways, *(chaos(at) for at in (HEAD, *OTHERS)))) as site:
        assert nodes.address
        site.hold()
        site.fill(16)
        old = site.engines[3]
        began = time.monotonic()
        kill(host_pid(old.pid))
        gone_s = until(lambda: not lives(old.pid), "its engine ends")
        for engine in site.engines[:3]:
            engine.command(delay_s=0.0)
        site.take(16)
        taken_s = time.monotonic() - began
        until(lambda: site.worker(3)["state"] == "ACTIVE" and site.worker(3)["process"]["starts"] == 2, "it is back")
        back_s = time.monotonic() - began
        figures = {"gone_s": gone_s, "taken_s": taken_s, "back_s": back_s}
        show("actor of an engine killed", {name: round(value, 2) for name, value in figures.items()})
        site.look()
        site.settle()
