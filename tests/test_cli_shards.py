"""`serve` with producer shards where there is no cluster to run them on, and what it says before that."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import run
from tests.test_cli import CONFIGS, free_port

SHARDS = CONFIGS / "shards.yaml"


def test_shards_without_a_cluster_say_what_to_run() -> None:
    """P35: one line at the field, with what to set and what to start; exit 2."""
    done = run("serve", "--config", SHARDS, "--set", "cluster=null")
    assert done.returncode == 2
    assert done.stderr.startswith("producer.shards: 2 shards are actors of a cluster: give `cluster: ray` (`ray start")
    assert len(done.stderr.splitlines()) == 1


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    """P35: nothing is started, and no file is made."""
    nobody = f"{{kind: ray, address: '127.0.0.1:{free_port()}'}}"
    journal = tmp_path / "journal.db"
    done = run("serve", "--config", SHARDS, "--set", f"cluster={nobody}", "--set", f"buffer.path={journal}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("cluster.address: no Ray cluster at '127.0.0.1:")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_not_restored_into_shards(tmp_path: Path) -> None:
    """P35: it is refused at the option, before a cluster is asked for."""
    (tmp_path / "snapshot").touch()
    done = run("serve", "--config", SHARDS, "--restore", tmp_path / "snapshot")
    assert done.returncode == 2
    assert done.stderr.startswith("--restore: makes one journal of a snapshot, and 2 shards (producer.shards) have one")


def test_a_dry_run_says_what_each_shard_will_have() -> None:
    """A line each; what cannot be divided is refused here already."""
    done = run("serve", "--config", SHARDS, "--dry-run")
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.splitlines()[-2:]
    assert one.startswith("shard s0: groups=4 limit=")
    assert other.endswith("shards.db.s1 workers=w1=s1.w0,w3=s1.w1")
    done = run("serve", "--config", SHARDS, "--dry-run", "--set", "trainer.train_batch_size=1")
    assert done.returncode == 2
    assert done.stderr.startswith("producer.shards: 2 shards for batches of 1 groups")
