"""The demo on a cluster, as a user runs it: one of its own, or somebody else's that it joins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Nodes

MARK = "ROLLOUT_TEST_RUN"
STARTED_S = 120
"""For cluster, service and engines to start on a busy machine."""
GONE_S = 15


class Run:
    """A run of the demo; whatever it starts inherits a variable by which it is found."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "rollout_svc", "demo", "--cluster", "ray", "--out", str(out), *arguments]
        environment = os.environ | {name: value, "HOME": str(out)}
        environment["TMPDIR"] = tempfile.mkdtemp(prefix="demo-", dir="/tmp")  # short: sockets are below it
        self.temporary = Path(environment["TMPDIR"])
        environment.pop("RAY_ADDRESS", None)  # else it would join that cluster
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def until_a_step(self) -> None:
        """Read until it says something of a step."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + STARTED_S
        for line in self.process.stdout:
            if line.startswith("step"):
                return
            assert time.monotonic() < deadline, line
        raise AssertionError(self.process.communicate()[1])

    def leaves_nothing(self) -> bool:
        """Whether no process and no file of its own is left, outside of its output."""
        nothing = until(lambda: not self.left() and not list(self.temporary.glob("ray-demo-*")))
        shutil.rmtree(self.temporary, ignore_errors=True)
        return nothing

    def left(self) -> list[str]:
        """Command lines of what it started that still is there."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_text(errors="replace").replace("\0", " "))
            except OSError:
                continue
        return found


def until(condition: Callable[[], bool], timeout_s: float = GONE_S) -> bool:
    """Wait until it holds; returns whether it does."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def actors_and_groups() -> tuple[set[str], set[str]]:
    """The actors that live, and the groups that are there, by Ray's state API."""
    from ray.util.state import list_actors, list_placement_groups

    actors: list[Any] = list_actors(filters=[("state", "!=", "DEAD")])
    groups: list[Any] = list_placement_groups(filters=[("state", "!=", "REMOVED")])
    return {actor["actor_id"] for actor in actors}, {group["placement_group_id"] for group in groups}


@pytest.mark.timeout(240)
def test_a_short_run_goes_all_the_way_round_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    """The summary is the plain demo's, with an account that adds up; the cluster ends with the run, its logs stay."""
    run = Run(tmp_path, "--steps", "6", "--seed", "3", "--json")
    out, err = run.process.communicate(timeout=200)
    assert run.process.returncode == 1, err
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [step["weight_version"] for step in summary["steps"]] == [1, 2, 3, 4, 5, 6]
    assert abs(summary["first_reward"] - summary["chance_reward"]) < 0.05
    assert all(step["pause_s"] > 0 for step in summary["steps"])
    for column in ("groups", "samples"):
        account = dict(summary["ledger"][column])
        assert account.pop("admitted") == sum(account.values())
        assert account["failed"] == account["leased"] == account["in_flight"] == 0
    assert summary["ledger"]["groups"]["consumed"] == 6 * 16
    assert summary["ledger"]["samples"]["consumed"] == 6 * 16 * 16
    assert summary["memory"]["rss_bytes"] > 10**7
    assert {"w0.log", "w1.log", "ray", "node.log"} <= {path.name for path in (tmp_path / "logs").iterdir()}
    assert run.leaves_nothing(), run.left()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_run_that_is_ended_leaves_no_cluster_behind(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C: no traceback, and what was seen is written. A kill: no raylet, actor or engine either."""
    run = Run(tmp_path, "--steps", "100000")
    run.until_a_step()
    assert any("raylet" in line for line in run.left())
    run.process.send_signal(how)
    _, err = run.process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert (run.process.returncode, err) == (1, "interrupted: everything that was started has ended\n")
        assert json.loads((tmp_path / "summary.json").read_text())["steps"]
        assert run.left() == []
    assert run.leaves_nothing(), run.left()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_cluster_that_is_joined_is_left_as_it_was(tmp_path: Path, nodes: Nodes, how: signal.Signals) -> None:
    """No actor, no group and no process of the run stays there, however it ended; the cluster does."""
    import ray

    alive: Any = ray.nodes
    before = actors_and_groups()
    run = Run(tmp_path, "--address", nodes.address, "--steps", "100000")
    run.until_a_step()
    assert len(actors_and_groups()[0] - before[0]) >= 3  # the service, two engines
    run.process.send_signal(how)
    _, err = run.process.communicate(timeout=60)
    assert how == signal.SIGKILL or err == "interrupted: everything that was started has ended\n"
    assert until(lambda: actors_and_groups() == before), (actors_and_groups(), before)
    assert run.leaves_nothing(), run.left()
    assert sum(node["Alive"] for node in alive()) >= 4
