"""An engine whose place was given to another, on a node that the cluster does not reach any more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.figures import show
from tests.cluster.leftovers import engine_processes, until
from tests.cluster.nodes import HEAD, Nodes
from tests.cluster.processes import host_pid, lives
from tests.cluster.site import chaos, config_of, started_site


@pytest.mark.timeout(180)
def test_an_engine_that_comes_back_from_a_hung_node_is_ended(nodes: Nodes, tmp_path: Path) -> None:
    """P19: of the two that are there then one is left, also while the raylet of the old one still hangs."""
    ways = tmp_path / "ways"
    node, room = nodes.add(spare=1), None
    spare = chaos()
    spare["launch"]["resources"] |= {"spare": 1}
    try:
        with started_site("given-up", ways, config_of(ways, chaos(HEAD), spare)) as site:
            old, held = site.engines[1], len(engine_processes())
            host = host_pid(old.pid)
            nodes.hang(node)
            for pid in (host, old.pid):
                os.kill(pid, signal.SIGSTOP)
            try:
                room = nodes.add(spare=1)
                elsewhere = f"http://{room.node_ip_address}"
                until(lambda: site.worker(1)["url"].startswith(elsewhere), "it is elsewhere", 60.0)
                until(lambda: site.worker(1)["state"] == "ACTIVE", "it is back", 60.0)
                assert lives(old.pid)
                assert len(engine_processes()) > held, "two engines of one worker"
            finally:
                for pid in (host, old.pid):
                    os.kill(pid, signal.SIGCONT)
            began = time.monotonic()
            until(lambda: not lives(old.pid), "the engine whose seat was given up ends")
            show("engine of a node that hung, back", {"gone_s": round(time.monotonic() - began, 2)})
            until(lambda: len(engine_processes()) == held, "its leash as well, and the new engine is left")
            assert not nodes.is_over(node), "its raylet still hangs: Ray has ended nothing"
            nodes.go_on(node)
            until(lambda: nodes.is_over(node), "the raylet learns that it was given up, and ends")
            site.look()
            site.put(4)
            site.settle()
    finally:
        for lost in (node, room):
            if lost is not None:
                nodes.lose(lost)
