"""A driver that was killed, and the next one: what it had is what its journal holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.leftovers import left_behind, nothing_left, until
from tests.cluster.nodes import OTHERS, Nodes
from tests.cluster.site import Site, chaos, config_of, started_site

PROMPTS = 12


@pytest.mark.timeout(180)
def test_the_next_driver_goes_on_from_the_journal(nodes: Nodes, tmp_path: Path) -> None:
    """P31: a batch that was leased is leased still, and every prompt that was given is consumed once."""
    import rollout_svc.ray

    assert nodes.address
    before = left_behind()
    ways, ready = tmp_path / "ways", tmp_path / "ready"
    ways.mkdir()
    config = config_of(ways, chaos(OTHERS[0])) | {"buffer": {"path": str(tmp_path / "journal.db"), "lease_s": 120.0}}
    command = [sys.executable, "-m", "tests.cluster.driver", "again", str(ready)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as driver:
        try:
            assert driver.stdin is not None
            with driver.stdin as told:
                told.write(json.dumps(config).encode())
            until(ready.exists, "the service is there", 60.0)
            site = Site(rollout_svc.ray.connect("again"), ways)
            site.look()
            for engine in site.engines:
                engine.command(delay_s=0.0)
            site.put(4)
            batch = site.take(4)
            site.hold()
            site.fill(PROMPTS - 4)
        finally:
            driver.kill()
    nothing_left(before)
    with started_site("again", ways, config) as next_one:
        given = next_one.call("take_batch", 0, 4, 30.0, [], timeout_s=35.0)
        assert given["batch_id"] == batch["batch_id"]
        next_one.call("ack", given["batch_id"])
        for engine in next_one.engines:
            engine.command(delay_s=0.0)
        rest = next_one.call("take_batch", 1, PROMPTS - 4, 30.0, [], timeout_s=35.0)
        next_one.call("ack", rest["batch_id"])
        ids = [group["prompt"]["id"] for taken in (given, rest) for group in taken["groups"]]
        assert sorted(ids) == sorted(f"p{number}" for number in range(PROMPTS))
        assert next_one.groups("consumed") == next_one.groups("admitted") == PROMPTS
