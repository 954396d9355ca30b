"""A service that dies at any moment and another on the same journal: nothing is lost, nothing comes twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import Stage, stage


def answered(call: Call) -> Reply:
    """Answer at once, with the prompt's number as the only token."""
    return Reply(tokens=[call.prompt_ids[-1]])


def ids(batch: dict[str, Any]) -> list[str]:
    """The prompts of a batch."""
    return [group["prompt"]["id"] for group in batch["groups"]]


@pytest.fixture
async def engine() -> Any:
    """Yield an engine that answers at once."""
    async with FakeSGLang(weight_version="0") as made:
        made.answer = answered
        yield made


class Disk:
    """A journal's file, and what is on the disk when its service dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "life0.sqlite"
        self.lives = 0

    def __call__(self) -> dict[str, Any]:
        """The `buffer` section of the configuration."""
        return {"path": str(self.path)}

    async def dies(self, made: Stage) -> None:
        """What has been written by now is what the next life finds."""
        await made.parts.storage.flush()
        self.lives += 1
        path = self._folder / f"life{self.lives}.sqlite"
        for end in ("", "-wal"):
            shutil.copy(f"{self.path}{end}", f"{path}{end}")
        self.path = path


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A journal of this test's own."""
    return Disk(tmp_path)


async def test_what_is_ready_leased_and_pushed_comes_back(engine: FakeSGLang, disk: Disk) -> None:
    """Ready groups are ready, a leased batch is leased under its id and step, pushed prompts wait in order."""  # P31
    small = {"train_batch_size": 2}
    async with stage(engine, pushed=5, buffer=disk(), trainer=small) as made:
        batch = await made.take(step=0, groups=2)
        await made.until(lambda: made.groups("ready") == 2)
        before = made.parts.ledger.as_json()
        await disk.dies(made)
    engine.answer = lambda _: None
    async with stage(engine, buffer=disk(), ready=False) as made:
        assert made.parts.ledger.as_json()["groups"]["leased"] == before["groups"]["leased"] == 2
        assert made.groups("ready") == 2
        assert [line.prompt_id for line in made.source._lines] == ["p4"]
        assert await made.push(5) == 0
        again = await made.take(step=0, groups=2)
        assert again == batch
        other = await made.take(step=1, groups=2)
        assert sorted(ids(again) + ids(other)) == ["p0", "p1", "p2", "p3"]
        await made.service.ack(batch["batch_id"])
        assert made.groups("consumed") == 2
        await disk.dies(made)
    async with stage(engine, buffer=disk(), ready=False) as made:
        await made.service.ack(batch["batch_id"])
        assert made.groups("consumed") == 2
        assert made.groups("leased") == 2
