"""Trajectories of a running service: every finished group, whatever becomes of it, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.assembly import prepare
from rollout_svc.errors import ConfigError
from rollout_svc.events import GroundTruthMissing, TrajectoriesFailing
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.filters import InlineFilter
from tests.support.stage import TASK, Stage, make_config, stage
from tests.support.stores import Store

PAIRS = {"prompt_repeat_k": 2, "train_batch_size": 8}


def answered(call: Call) -> Reply:
    return Reply(tokens=[5, 6, call.prompt_ids[-1]])


def written(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def filtering() -> list[dict[str, Any]]:
    """The one task of a stage, with a filter the test holds in its hands."""
    task = {"name": TASK, "prompts": {"push": True}, "judger": {"path": "tests.support.judges:Judge"}}
    return [task | {"filter": {"path": "tests.support.filters:InlineFilter"}}]


def plugin_of(made: Stage) -> InlineFilter:
    desk = made.service.prepared.runtimes[TASK].filter
    assert desk is not None
    plugin: InlineFilter = desk._keep.__self__  # type: ignore[attr-defined]
    return plugin


async def test_every_finished_group_is_written_before_any_filter(engine: FakeSGLang, tmp_path: Path) -> None:
    """Kept or filtered, a finished group is a line; one that failed is not. All are there once it has stopped."""
    path = tmp_path / "t.jsonl"
    async with stage(engine, tasks=filtering(), trainer=PAIRS, trajectories={"path": str(path)}) as made:
        plugin_of(made).verdict = lambda group: "dull" if group.prompt_id == "p1" else None
        made.judge.verdict = lambda sample: ValueError("no") if sample.ground_truth == 2 else 0.5
        await made.push(4)
        batch = await made.take(groups=2)
        await made.until(lambda: made.groups("filtered") == made.groups("failed") == 1)
        status = made.service.status()["trajectories"]
        assert set(status) == {"path", "written", "failed", "bytes"}
    found = {line["prompt"]["id"]: line for line in written(path)}
    assert sorted(found) == ["p0", "p1", "p3"]
    for group in batch["groups"]:
        line = found[group["prompt"]["id"]]
        assert line["prompt"] == group["prompt"]
        assert line["ground_truth"] == group["prompt"]["ground_truth"]
        for one, other in zip(line["samples"], group["samples"], strict=True):
            assert one.pop("generate_s") > 0
            assert one.pop("judge_s") >= 0
            assert one == other
    assert all(sample["status"] == "COMPLETED" for sample in found["p1"]["samples"])
    assert found["p1"]["created_at"] <= found["p1"]["finished_at"]
    status = made.service.status()["trajectories"]
    assert (status["path"], status["written"], status["failed"]) == (str(path), 3, 0)
    assert status["bytes"] == path.stat().st_size
    assert not made.of(GroundTruthMissing)


async def test_a_put_that_is_repeated_writes_no_second_line(engine: FakeSGLang, tmp_path: Path) -> None:
    """A group that a pause took back from its storage is made durable again, and was written already."""
    path, store = tmp_path / "t.jsonl", Store()
    async with stage(engine, trainer=PAIRS, storage=store, trajectories={"path": str(path)}) as made:
        store.block = True
        await made.push(1)
        await made.until(lambda: store.saving == 1)
        await made.pause(deadline_s=0.3)
        assert made.groups("aborted") == 1
        store.go_on.set()
        await made.resume()
        await made.take(groups=1)
        assert store.saving == 2
    assert len(written(path)) == 1


async def test_a_missing_ground_truth_is_no_error(engine: FakeSGLang, tmp_path: Path) -> None:
    """It is written as null, and warned about once."""
    path = tmp_path / "t.jsonl"
    async with stage(engine, trainer=PAIRS, trajectories={"path": str(path)}) as made:
        await made.push([{"id": f"p{n}", "input_ids": [n]} for n in range(3)])
        await made.take(groups=3)
        assert len(made.of(GroundTruthMissing)) == 1
    assert [line["ground_truth"] for line in written(path)] == [None] * 3


async def test_a_disk_that_fails_stops_nothing(engine: FakeSGLang, tmp_path: Path) -> None:
    """A folder that is taken away while the service runs is told, once, and batches go on."""
    folder = tmp_path / "folder"
    folder.mkdir()
    async with stage(engine, trainer=PAIRS, trajectories={"path": str(folder / "t")}) as made:
        folder.rmdir()
        await made.push(3)
        batch = await made.take(groups=3)
        assert len(batch["groups"]) == 3
    status = made.service.status()["trajectories"]
    assert (status["written"], status["failed"]) == (0, 3)
    assert len(made.of(TrajectoriesFailing)) == 1


def test_a_path_that_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    """P35: a folder, or a file in no folder, is refused at `trajectories.path`, with everything else that is wrong."""
    tasks = [{"name": TASK, "prompts": {"push": True}, "judger": {"name": "no_such"}}]
    for path in (tmp_path, tmp_path / "no" / "t"):
        with pytest.raises(ConfigError) as refused:
            prepare(make_config(tasks=tasks, trajectories={"path": str(path)}))
        assert [problem.path for problem in refused.value.problems] == ["tasks.0.judger.name", "trajectories.path"]
