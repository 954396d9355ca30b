"""Every kind of source through several lives of a service on one journal, with a filter and trajectories beside it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.events import SourceSkips
from tests.service.test_recovery import Disk
from tests.support.answers import its_number as answered
from tests.support.fake_sglang import FakeSGLang
from tests.support.sources import counted
from tests.support.stage import TASK, stage


def prompts(kind: str, folder: Path) -> dict[str, Any]:
    """The `prompts` section that gives `p0` to `p23`, once each."""
    if kind != "jsonl":
        return {"source": f"tests.support.sources:{kind}"}
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in counted()))
    return {"jsonl": str(path), "epochs": 1}


def written(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["jsonl", "Counting", "counted"])
async def test_every_prompt_is_used_once_over_all_lives(kind: str, tmp_path: Path) -> None:
    """P1, P31: over restarts each prompt is consumed or filtered, exactly once, and each finished group is written."""
    disk, path = Disk(tmp_path), tmp_path / "t.jsonl"
    task = {
        "name": TASK,
        "prompts": prompts(kind, tmp_path),
        "judger": {"path": "tests.support.judges:Judge"},
        "filter": {"path": "tests.service.test_sources_last:drop_thirds"},
    }
    consumed: list[str] = []
    skipped: list[int] = []
    small = {"train_batch_size": 2, "max_staleness": 1}
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = answered
        for life in range(4):
            record = {"path": str(path)}
            async with stage(engine, buffer=disk(), tasks=[task], trainer=small, trajectories=record) as made:
                for _ in range(2):
                    batch = await made.take(step=0, groups=2)
                    await made.service.ack(batch["batch_id"])
                    consumed += [group["prompt"]["id"] for group in batch["groups"]]
                if life == 3:
                    await made.until(lambda: made.groups("filtered") == 8)
                    assert made.service.status()["producer"]["sources"][TASK]["used"] == 24
                    assert made.groups("consumed") == 16
                skipped += [event.lines for event in made.of(SourceSkips)]
                await disk.dies(made)
    assert sorted(consumed) == sorted(f"p{n}" for n in range(24) if n % 3)
    assert (len(skipped) == 3 and skipped == sorted(skipped)) if kind == "counted" else not skipped
    lines = Counter(line["prompt"]["id"] for line in written(path))
    assert set(lines) == {f"p{n}" for n in range(24)}


def drop_thirds(group: Any) -> str | None:
    """Drop every third prompt."""
    return "third" if group.ground_truth % 3 == 0 else None
