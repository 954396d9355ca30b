"""Two shards: what a coordinator has promised outlives it, and `serve` runs them as it runs one loop."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_svc import SyncRolloutClient
from rollout_svc.errors import NotNow, RolloutError
from rollout_svc.sharding.shares import home_of
from tests.cluster.configs import ON_HEAD, engine, lines, service
from tests.cluster.leftovers import left_behind, nothing_left, until
from tests.cluster.nodes import OTHERS, Nodes
from tests.cluster.processes import actor_pid, kill, shard_pids
from tests.cluster.test_serve import command, run

WAIT_S = 60.0


def two_shards(folder: Path, **sections: Any) -> dict[str, Any]:
    """Two shards with an engine each, whose leases are short."""
    own = {"buffer": {"path": str(folder / "journal"), "lease_s": 8.0}, "producer": {"shards": 2}}
    return service(*(engine(at=address) for address in OTHERS[:2]), **own, **sections)


def of_second(count: int, first: int) -> list[dict[str, Any]]:
    """Prompts that all belong to the second shard."""
    return [line for line in lines(400, first) if home_of("t", line["id"], 2) == 1][:count]


def holder(journal: Path) -> int:
    """The process of the shard that has a journal open."""
    for pid in shard_pids():
        with suppress(OSError):
            if any(fd.readlink() == journal for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise AssertionError(f"nobody has {journal}")


@contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Have a journal in use as soon as whoever has it is gone."""
    connection = sqlite3.connect(journal, isolation_level=None, timeout=30.0)
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        connection.close()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("nodes")
def test_an_owed_ack_outlives_coordinator_and_shard(tmp_path: Path) -> None:
    """P1, P31: killed with an ack owed to a shard that is lost, they come back, and its groups are trained on once.

    That shard's journal is in use when it returns: it is held, says when it tries again, and comes when it is free.
    """
    import ray

    import rollout_svc.ray

    rollout = rollout_svc.ray.start(two_shards(tmp_path), name="owed", **ON_HEAD)

    def told() -> dict[str, Any]:
        """How it stands; empty while it does not say."""
        try:
            answer: dict[str, Any] = ray.get(rollout.status.remote(), timeout=20)
        except (ray.exceptions.RayError, RolloutError):
            return {}
        return answer

    def second() -> dict[str, Any]:
        return next((shard for shard in told().get("shards", []) if shard["id"] == "s1"), {})

    try:
        assert ray.get(rollout.put_prompts.remote("t", of_second(2, 0)), timeout=30) == {"accepted": 2}
        batch = ray.get(rollout.take_batch.remote(0, 2, 60.0, None), timeout=70)
        given = [group["group_id"] for group in batch["groups"]]
        journal = tmp_path / "journal.s1"
        os.kill(lost := holder(journal), signal.SIGSTOP)
        with pytest.raises(NotNow, match="is acknowledged, and consumed when its shards return"):
            ray.get(rollout.ack.remote(batch["batch_id"]), timeout=60)
        kill(actor_pid("owed"))
        with suppress(ProcessLookupError):
            kill(lost)
        with locked(journal):
            until(lambda: second().get("again_in_s") is not None, "the shard says when it tries again", WAIT_S)
            said = second()
            assert said["state"] == "held"
            assert "in use by another process; it is tried again in" in said["reason"]
        until(lambda: second().get("state") == "in_step", "the shard is back", WAIT_S)
        assert told()["ledger"]["groups"]["consumed"] == 2, "nobody had to ask"
        assert ray.get(rollout.ack.remote(batch["batch_id"]), timeout=30)["acknowledged"]
        assert ray.get(rollout.put_prompts.remote("t", of_second(2, 400)), timeout=30) == {"accepted": 2}
        after = ray.get(rollout.take_batch.remote(1, 2, 60.0, None), timeout=70)
        assert not {group["group_id"] for group in after["groups"]} & set(given)
    finally:
        rollout_svc.ray.stop(rollout)


@pytest.mark.timeout(240)
def test_serve_runs_shards(tmp_path: Path, nodes: Nodes) -> None:
    """They are actors of the cluster behind one control API; a signal drains them, and leaves nothing there."""
    before = left_behind()
    path = tmp_path / "rollout.yaml"
    path.write_text(yaml.safe_dump(two_shards(tmp_path, cluster={"kind": "ray", "address": nodes.address})))

    done = run("serve", "--config", path, "--preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("shard ")]
    assert [line.partition(" limit=")[0] for line in said] == ["shard s0: groups=2", "shard s1: groups=2"]
    assert said[0].endswith(f"journal={tmp_path}/journal.s0 workers=w0=s0.w0")
    assert done.stdout.splitlines()[-1] == "nothing would fail"
    assert not list(tmp_path.glob("journal*"))

    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command("serve", "--config", path), stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith("service.ready")), "")
            url = ready.partition("url=")[2].strip()
            assert url, (tmp_path / "log").read_text()
            with SyncRolloutClient(url) as client:
                client.put_prompts("t", lines(4))
                batch = client.take_batch(0, 4, timeout_s=60)
                assert len(batch["groups"]) == 4
                client.ack(batch["batch_id"])
            told = json.loads(run("status", "--url", url, "--json").stdout)
            assert [shard["state"] for shard in told["shards"]] == ["in_step", "in_step"]
            assert told["ledger"]["groups"]["consumed"] == 4
            assert json.loads(run("pause", "--url", url, "--json").stdout)["clean"]
            assert json.loads(run("resume", "--url", url, "--json").stdout)["state"] == "running"
            process.send_signal(signal.SIGUSR1)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert "stuck.counts" in (tmp_path / "log").read_text()
    nothing_left(before)
