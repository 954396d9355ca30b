"""`rollout-svc` on a cluster: `serve` as a driver there, `--preflight`, and the calls that reach an actor by HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_svc import SyncRolloutClient
from tests.cluster.configs import ON_HEAD, engine, lines, service
from tests.cluster.nodes import OTHERS, Nodes

WAIT_S = 60.0


def command(*arguments: object) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "rollout_svc", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=WAIT_S, check=False)


def written(folder: Path, nodes: Nodes, *workers: dict[str, Any], **cluster: Any) -> Path:
    """Write a configuration for this cluster."""
    path = folder / "rollout.yaml"
    sections = service(*workers, cluster={"kind": "ray", "address": nodes.address, **cluster})
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.mark.timeout(120)
def test_a_preflight_says_what_the_cluster_has(tmp_path: Path, nodes: Nodes) -> None:
    """Nodes and what is free against what engines want; who cannot be placed is named, and nothing is started."""
    path = written(tmp_path, nodes, *(engine(at=address) for address in OTHERS[:2]), strategy="spread")
    done = run("serve", "--config", path, "--preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert any(line.startswith(f"cluster {nodes.address}: ") and "engines want CPU 1, " in line for line in said)
    assert sum(line.startswith("node 127.0.1.") for line in said) >= 4
    assert said[-1] == "nothing would fail"

    path = written(tmp_path, nodes, engine(), engine(resources={"GPU": 1}))
    done = run("serve", "--config", path, "--preflight", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    assert report["problems"] == [{"path": "workers.1.launch.resources", "message": "no node of the cluster has GPU 1"}]
    assert report["cluster"]["wanted"] == {"CPU": 0.5, "GPU": 1.0}


@pytest.mark.timeout(180)
def test_serve_is_a_driver_of_the_cluster(tmp_path: Path, nodes: Nodes) -> None:
    """Its engines run on their nodes, `status`, `pause` and `resume` reach it, and a signal leaves nothing there."""
    from ray.util.state import list_placement_groups

    def groups() -> set[str]:
        found: list[Any] = list_placement_groups(filters=[("state", "!=", "REMOVED")])
        return {group["placement_group_id"] for group in found}

    before = groups()
    path = written(tmp_path, nodes, engine(at=OTHERS[0]))
    with subprocess.Popen(
        command("serve", "--config", path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if line.startswith("service.ready")).split("url=")[1].strip()
            with SyncRolloutClient(url) as client:
                client.put_prompts("t", lines(4))
                assert len(client.take_batch(0, 4, timeout_s=30)["groups"]) == 4
            told = json.loads(run("status", "--url", url, "--json").stdout)
            assert told["workers"][0]["url"].startswith(f"http://{OTHERS[0]}:")
            assert json.loads(run("pause", "--url", url, "--json").stdout)["clean"]
            assert json.loads(run("resume", "--url", url, "--json").stdout)["state"] == "running"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert process.returncode == 0
    deadline = time.monotonic() + 10
    while groups() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert groups() == before


@pytest.mark.short
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nodes")
def test_the_command_line_reaches_an_actor() -> None:
    """`ready` says where it listens; there `status`, `pause` and `resume` do what they do anywhere."""
    import ray

    import rollout_svc.ray

    rollout = rollout_svc.ray.start(service(engine()), name="command-line", **ON_HEAD)
    try:
        url: str = ray.get(rollout.ready.remote(), timeout=30)
        report = json.loads(run("pause", "--url", url, "--json").stdout)
        assert report["clean"]
        assert ray.get(rollout.status.remote(), timeout=10)["state"] == "paused"
        assert run("resume", "--url", url, "--ticket", report["ticket"]).returncode == 0
        assert json.loads(run("status", "--url", url, "--json").stdout)["state"] == "running"
    finally:
        rollout_svc.ray.stop(rollout)
