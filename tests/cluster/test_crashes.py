"""Whoever holds the service dies: its actor, its node, its driver, its trainer; nothing is lost or left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.figures import show
from tests.cluster.leftovers import engine_processes, left_behind, nothing_left, until
from tests.cluster.nodes import HEAD, OTHERS, Nodes
from tests.cluster.processes import actor_pid, kill, lives
from tests.cluster.site import Site, chaos, config_of, started_site
from tests.cluster.trainer import Trainer

PROMPTS = 16


def two() -> list[dict[str, Any]]:
    """Make two workers."""
    return [chaos(address) for address in OTHERS[:2]]


def lived(config: dict[str, Any], tmp_path: Path, lease_s: float = 60.0) -> dict[str, Any]:
    """Lay a journal below a configuration."""
    return config | {"buffer": {"path": str(tmp_path / "journal.db"), "lease_s": lease_s}}


def lent_and_running(site: Site) -> dict[str, Any]:
    """Have a batch leased, and more under way at every engine."""
    for engine in site.engines:
        engine.command(delay_s=0.0)
    site.put(4)
    batch = site.take(4)
    site.hold()
    site.fill(PROMPTS - 4)
    return batch


def comes_back(site: Site, batch: dict[str, Any], began: float) -> dict[str, float]:
    """See that a service goes on: it answers, shows the batch that was leased again, and all else is consumed."""
    until(site.answers, "the service answers", 60.0)
    answered_s = time.monotonic() - began
    again = site.call("take_batch", 0, 4, 30.0, [], timeout_s=35.0)
    assert again["batch_id"] == batch["batch_id"], "a batch that was not acknowledged is still leased"
    assert [group["group_id"] for group in again["groups"]] == [group["group_id"] for group in batch["groups"]]
    until(lambda: {worker["state"] for worker in site.status()["workers"]} == {"ACTIVE"}, "its engines are there", 60.0)
    engines_s = time.monotonic() - began
    site.look()
    for engine in site.engines:
        engine.command(delay_s=0.0)
    site.consume()
    return {"answers_s": round(answered_s, 2), "engines_s": round(engines_s, 2)}


@pytest.mark.short
@pytest.mark.timeout(180)
def test_the_actor_of_the_service_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """It is started again, from its journal; the engines of the life before are gone."""  # P31
    ways = tmp_path / "ways"
    with started_site("killed", ways, lived(config_of(ways, *two()), tmp_path)) as site:
        assert nodes.address
        batch = lent_and_running(site)
        before = set(engine_processes())
        began = time.monotonic()
        kill(actor_pid("killed"))
        gone_s = until(lambda: not any(map(lives, before)), "the engines of the life before are gone")
        figures = comes_back(site, batch, began)
        show("actor of the service killed", {"engines_gone_s": round(gone_s, 2)} | figures)
        assert site.groups("consumed") == PROMPTS
        assert len(engine_processes()) == len(before)


@pytest.mark.timeout(180)
def test_no_group_outlives_the_life_that_made_it(nodes: Nodes, tmp_path: Path) -> None:
    """The placement group of a service that was killed is gone at the latest when its next life stops."""
    assert nodes.address
    before = left_behind()
    ways = tmp_path / "ways"
    with started_site("grouped", ways, lived(config_of(ways, *two()), tmp_path)) as site:
        kill(actor_pid("grouped"))
        until(site.answers, "the service answers", 60.0)
        site.look()
    nothing_left(before, 5.0)


@pytest.mark.timeout(180)
def test_the_node_of_the_service_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """It is started again on another node, from its journal, which both can reach."""  # P31
    ways = tmp_path / "ways"
    home, other = nodes.add(home=1), None
    try:
        config = lived(config_of(ways, *two()), tmp_path)
        with started_site("moved", ways, config, resources={"home": 1}) as site:
            batch = lent_and_running(site)
            before = set(engine_processes())
            other = nodes.add(home=1)
            began = time.monotonic()
            nodes.lose(home)
            gone_s = until(lambda: not any(map(lives, before)), "the engines of the life before are gone")
            figures = comes_back(site, batch, began)
            show("node of the service lost", {"engines_gone_s": round(gone_s, 2)} | figures)
            assert site.groups("consumed") == PROMPTS
    finally:
        for node in (home, other):
            if node is not None:
                nodes.lose(node)


@pytest.mark.short
@pytest.mark.timeout(180)
def test_the_driver_crashes(nodes: Nodes, tmp_path: Path) -> None:
    """The service that it started ends with it: no actor, group or engine is left."""
    assert nodes.address
    before = left_behind()
    ways = tmp_path / "ways"
    ways.mkdir()
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "tests.cluster.driver", "crashes", str(ready)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as driver:
        try:
            assert driver.stdin is not None
            with driver.stdin as told:
                told.write(json.dumps(config_of(ways, *two())).encode())
            until(ready.exists, "the service is there", 60.0)
            assert len(engine_processes()) == 6, "two engines, each on a leash, with a process between it and its actor"
        finally:
            driver.kill()
    show("driver killed", {"nothing_left_s": round(nothing_left(before), 2)})


@pytest.mark.timeout(180)
def test_a_trainer_dies_with_a_batch(nodes: Nodes, tmp_path: Path) -> None:
    """Its lease ends, and another trainer gets the same groups; each is consumed once."""  # P31
    import ray

    lease_s = 3.0
    ways = tmp_path / "ways"
    with started_site("lent", ways, lived(config_of(ways, *two()), tmp_path, lease_s)) as site:
        assert nodes.address
        for engine in site.engines:
            engine.command(delay_s=0.0)
        site.put(4)
        trainer: Any = ray.remote(Trainer).options(num_cpus=0).remote("lent")
        lent = ray.get(trainer.take.remote(4), timeout=40)
        began = time.monotonic()
        kill(ray.get(trainer.pid.remote(), timeout=10))
        again = site.call("take_batch", 1, 4, 20.0, timeout_s=25.0)
        show("trainer dies with a batch", {"lease_s": lease_s, "again_s": round(time.monotonic() - began, 2)})
        assert sorted(group["group_id"] for group in again["groups"]) == sorted(lent)
        site.call("ack", again["batch_id"])
        assert site.groups("consumed") == site.groups("admitted") == 4


@pytest.mark.timeout(180)
def test_the_object_store_is_full(nodes: Nodes, tmp_path: Path) -> None:
    """While objects of others spill to disk, batches are taken and a pause is in time."""  # P8
    import numpy as np
    import ray

    ways = tmp_path / "ways"
    with started_site("spills", ways, config_of(ways, chaos(HEAD), chaos(OTHERS[0]))) as site:
        assert nodes.address
        site.hold()
        site.fill(PROMPTS)
        began = time.monotonic()
        held = [ray.put(np.full(48 * 2**20, number, np.uint8)) for number in range(6)]  # 288 MiB into 128
        full_s = time.monotonic() - began
        report = site.pause()
        assert report["clean"]
        site.resume()
        for engine in site.engines:
            engine.command(delay_s=0.0)
        began = time.monotonic()
        site.take(PROMPTS)
        taken_s = time.monotonic() - began
        figures = {"put_288_mib_s": full_s, "pause_s": report["caller_s"], "take_s": taken_s}
        show("object store full", {name: round(value, 2) for name, value in figures.items()})
        assert [int(ray.get(kept, timeout=30)[0]) for kept in held] == list(range(6))
        site.consume()


@pytest.mark.timeout(120)
def test_nothing_is_left_after_a_stop(nodes: Nodes, tmp_path: Path) -> None:
    """A stop in the middle of generation ends its actors, its placement group and its engines."""
    assert nodes.address
    before = left_behind()
    ways = tmp_path / "ways"
    with started_site("stops", ways, config_of(ways, *two())) as site:
        site.hold()
        site.fill(PROMPTS)
        assert len(engine_processes()) == 6, "two engines, each on a leash, with a process between it and its actor"
        began = time.monotonic()
    nothing_left(before)
    show("stop", {"nothing_left_s": round(time.monotonic() - began, 2)})
