"""The bundles of a real placement group, on nodes whose addresses sort the wrong way."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ray import placement_nodes

ROOT = Path(__file__).parent.parent.parent
CLUSTER_S = 100.0


@pytest.mark.timeout(120)
def test_the_order_given_is_the_order_a_process_gets() -> None:
    """From the settings to the environment: by trainer's rank, not by index, nor by address in any spelling."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home:
        command = [sys.executable, "-m", placement_nodes.__name__, home]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["places"] == list(placement_nodes.PLACES)
    ranks = [placement_nodes.PLACES[index] for index in placement_nodes.ORDER]
    assert ranks not in (sorted(ranks), sorted(ranks, key=lambda ip: int(ip.rpartition(".")[2])))
    assert seen["told"] == {"good": "2,0,1"}
    assert seen["w0"] == "ended with exit code 0"
    assert seen["w1"] == (
        "could not be started: bundles [3, 2, 4] of placement group 'trainer': "
        "placement.bundles.0: bundle 3 holds no SIM, but CPU 0.5, at-127.0.0.10 0.1 on 127.0.0.10; "
        "placement.bundles.2: 4 is no bundle of the group: it has 4, counted from 0; "
        "placement.bundles: 1 of the bundles can be used, and tensor_parallel is 3"
    )
    words = "placement.group: Ray at 127.0.0.1:1 cannot be asked: ConnectionRefusedError: "
    assert seen["unreachable"].startswith(words)
