"""What `bench.cluster` measures with: the report of what could not be measured, and the watch on tensors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.cluster import deployments
from bench.cluster.__main__ import CASES
from bench.cluster.byref import LAYERS, ROWS, TOP_K
from bench.cluster.watched import WATCHED, Counts, Judge, read_counts
from bench.report import Missing, Point, report
from bench.served import GROUP_SIZE
from bench.workload import PROMPT_TOKENS
from rollout_svc.config import Config
from rollout_svc.tensors.store import MemoryStore


def test_every_case_is_there() -> None:
    """As the issue spells them; a batch of routed experts has 64 MiB."""
    assert list(CASES) == ["actor", "shards4", "pause4", "byref"]
    assert GROUP_SIZE * ROWS * LAYERS * TOP_K * 2 == 64 * 2**20
    assert ROWS + 1 > PROMPT_TOKENS


def test_what_could_not_be_measured_is_in_the_report() -> None:
    """Without figures, with the reason; and the report is not met."""
    told = report("cluster", [Point("actor", 1.0, 1.0, 1.15), Missing("byref", "why", 0.0)])
    assert [point["case"] for point in told["points"]] == ["actor", "byref"]
    assert told["points"][1] == {
        "case": "byref",
        "value": None,
        "floor": None,
        "ratio": None,
        "bound": 0.0,
        "better": "lower",
        "why": "why",
    }
    assert not told["met"]


async def test_a_tensor_counts_where_it_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a thread with an event loop, or in one without: which of the two is what a judger tells the bench."""
    for where, name in WATCHED:
        monkeypatch.setattr(where, name, getattr(where, name))  # put back when the test is over
    counts = tmp_path / "counts"
    judge = Judge(str(counts))
    assert judge.instant
    assert read_counts(counts) == Counts(0, 0)
    MemoryStore().put(np.zeros(1000, np.uint8)).view()
    assert read_counts(counts) == Counts(2000, 0)
    thread = threading.Thread(target=lambda: MemoryStore().put(np.zeros(500, np.uint8)))
    thread.start()
    thread.join(5.0)
    assert read_counts(counts) == Counts(2000, 500)
    other = tmp_path / "counts.another"
    other.write_bytes((tmp_path / f"counts.{os.getpid()}").read_bytes())
    assert read_counts(counts) == Counts(4000, 1000), "those of all processes"


def test_the_two_deployments_differ_in_the_cluster_alone() -> None:
    """So that what is compared is what it costs to be on one."""
    plain = deployments.config([deployments.canned(on_ray=False)] * 2, 64)
    on_ray = deployments.config([deployments.canned(on_ray=True)] * 2, 64)
    assert on_ray.pop("cluster")["kind"] == "ray"
    for worker in on_ray["workers"]:
        worker["launch"].pop("resources", None)
    assert on_ray == plain
    assert Config.model_validate(plain).cluster is None
