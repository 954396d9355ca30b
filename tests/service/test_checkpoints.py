"""Snapshots of a service, and services that go on from one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.buffer.checkpoints import Checkpoints
from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.buffer.snapshots import Snapshot, read_snapshot
from rollout_svc.errors import BadRequest, ConfigError, Conflict, NotNow
from rollout_svc.recovery import Restore
from rollout_svc.tasks import TaskOwner
from tests.support.answers import ids
from tests.support.answers import its_number as answered
from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import Stage, lines, stage

SMALL = {"train_batch_size": 2, "max_staleness": 100}


class Folder:
    """Where journals and snapshots lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshot = path / "snapshot.db"

    def __call__(self, name: str = "journal.db") -> dict[str, Any]:
        """The `buffer` section of the configuration."""
        return {"path": str(self.path / name)}

    def restore(self, step: int | None = None) -> Restore:
        """Go on from the snapshot."""
        return Restore(self.snapshot, step)

    @property
    def partial(self) -> list[str]:
        """What was begun and is still there."""
        return [path.name for path in self.path.iterdir() if "partial" in path.name]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder of this test's own."""
    return Folder(tmp_path)


async def step(made: Stage, number: int, groups: int = 1) -> list[str]:
    """Do a trainer's step: take, and acknowledge."""
    batch = await made.take(step=number, groups=groups)
    await made.service.ack(batch["batch_id"])
    return ids(batch)


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
async def test_a_snapshot_has_everything_noted_before_it(engine: FakeSGLang, folder: Folder, paused: bool) -> None:
    """Running and paused: what was answered before the call is in it, and it says how much that is."""
    async with stage(engine, pushed=5, buffer=folder(), trainer=SMALL) as made:
        await step(made, 0)
        lent = await made.take(step=1)
        await made.until(lambda: made.groups("ready") == 3)
        if paused:
            await made.pause()
        told = await made.service.checkpoint(str(folder.snapshot), 2)
        assert told["path"] == str(folder.snapshot)
        assert (told["step"], told["groups"], told["samples"]) == (2, 4, 4)
        assert told["bytes"] == folder.snapshot.stat().st_size
        assert 0 < told["seconds"] < 10
        assert folder.partial == []
    async with stage(engine, buffer=folder("new.db"), restore=folder.restore(), ready=False) as made:
        assert made.groups("consumed") == 1
        assert await made.take(step=1) == lent
        assert made.groups("ready") == 3
        assert await made.push(5) == 0


async def test_acks_that_come_with_it_are_in_it(engine: FakeSGLang, folder: Folder) -> None:
    """A batch that is acknowledged with the call is consumed in the snapshot; one whose lease has ended is told."""
    async with stage(engine, pushed=2, buffer=folder() | {"lease_s": 3600.0}, trainer=SMALL) as made:
        first, second = [await made.take(step=number) for number in range(2)]
        told = await made.service.checkpoint(str(folder.snapshot), 2, ack=[first["batch_id"], "unknown"])
        assert told["ack_expired"] == ["unknown"]
        assert made.groups("consumed") == 1
    async with stage(engine, buffer=folder("new.db"), restore=folder.restore(), ready=False) as made:
        assert made.groups("consumed") == 1
        assert await made.take(step=1) == second


async def test_a_snapshot_of_nothing_is_refused(engine: FakeSGLang, folder: Folder) -> None:
    """Without a journal there is nothing to write a snapshot of."""
    async with stage(engine) as made:
        with pytest.raises(Conflict, match=r"buffer\.path") as refused:
            await made.service.checkpoint(str(folder.snapshot), 0)
        assert refused.value.type == "no_journal"


async def test_a_place_that_cannot_be_is_refused(engine: FakeSGLang, folder: Folder) -> None:
    """No folder, somebody's file, the journal itself: refused, and all as before; the service goes on."""
    other = folder.path / "notes.txt"
    other.write_text("mine")
    async with stage(engine, pushed=1, buffer=folder()) as made:
        with pytest.raises(BadRequest, match=r"^path: there is no folder"):
            await made.service.checkpoint(str(folder.path / "nowhere" / "s.db"), 0)
        for place in (other, folder.path / "journal.db", folder.path):
            with pytest.raises(Conflict) as refused:
                await made.service.checkpoint(str(place), 0)
            assert refused.value.type == "exists"
        for folder_of_the_kernel in ("/sys", "/proc"):
            with pytest.raises(BadRequest, match=r"^path: cannot write"):
                await made.service.checkpoint(f"{folder_of_the_kernel}/snapshot.db", 0)
        with pytest.raises(BadRequest, match=r"^path: no file has a null character"):
            await made.service.checkpoint(f"{folder.path}/a\0b", 0)
        nonsense: Any
        for nonsense in (-1, "1", 1.0):
            with pytest.raises(BadRequest, match=r"^step: expected a whole number"):
                await made.service.checkpoint(str(folder.snapshot), nonsense)
        assert not folder.snapshot.exists()
        assert other.read_text() == "mine"
        assert await step(made, 0) == ["p0"]
        assert (await made.service.checkpoint(str(folder.snapshot), 1))["step"] == 1
    assert folder.partial == []


async def test_many_at_once_are_written_one_after_the_other(engine: FakeSGLang, folder: Folder) -> None:
    """Each call gets a snapshot of its own, also of one path, while batches go on being taken."""
    async with stage(engine, pushed=20, buffer=folder(), trainer=SMALL) as made:
        calls = [made.start(made.service.checkpoint(str(folder.snapshot), number)) for number in range(4)]
        calls.append(made.start(made.service.checkpoint(str(folder.path / "other.db"), 4)))
        taken = [await step(made, 0) for _ in range(10)]
        told = await asyncio.gather(*calls)
        assert [one["step"] for one in told] == [0, 1, 2, 3, 4]
        assert len({prompt for batch in taken for prompt in batch}) == 10
    assert read_snapshot(folder.snapshot).step == 3
    assert read_snapshot(folder.path / "other.db").step == 4


class Disk:
    """Storage whose snapshots go as a test says."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault
        self.begun = asyncio.Event()
        self.over: Callable[[], bool] = lambda: False

    async def snapshot(self, target: Path, step: int, over: Callable[[], bool], within_s: float) -> Snapshot:
        self.over = over
        self.begun.set()
        if self.fault is None:
            await asyncio.Event().wait()
        raise self.fault or AssertionError


@pytest.mark.parametrize(
    "fault", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left"), JournalFailed("gone")]
)
async def test_a_full_disk_is_told(folder: Folder, fault: Exception) -> None:
    """What cannot be written now is a 503 of its own type, with the reason."""
    parts = Checkpoints(tasks=TaskOwner(), storage=Disk(fault), acknowledge=lambda _: ())
    with pytest.raises(NotNow, match=str(folder.snapshot)) as refused:
        await parts.write(str(folder.snapshot), 0)
    assert refused.value.type == "checkpoint_failed"


async def test_a_caller_that_leaves_ends_nothing(folder: Folder) -> None:
    """A cancelled call propagates; the copy goes on, until the service stops and tells it to end."""  # P14
    tasks, disk = TaskOwner(), Disk(None)
    call = asyncio.ensure_future(
        Checkpoints(tasks=tasks, storage=disk, acknowledge=lambda _: ()).write(str(folder.snapshot), 0)
    )
    await disk.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(tasks.live) == 1
    assert not disk.over()
    assert await tasks.close(asyncio.get_running_loop().time() + 1.0) == ()
    assert disk.over()


# -- going on from it --------------------------------------------------------------------------------------------------


async def test_an_earlier_step_gives_its_prompts_back_first(engine: FakeSGLang, folder: Folder) -> None:
    """Prompts consumed at the step or later are admitted again, before all others, with what came with them.

    The ledger counts them as if they had never been taken; another number of workers and samples works.
    """  # P31
    pushed = [line | {"meta": {"n": number}} for number, line in enumerate(lines(6))]
    async with stage(engine, buffer=folder(), trainer=SMALL) as made:
        await made.push(pushed)
        first = [await step(made, number) for number in range(4)]
        await made.service.checkpoint(str(folder.snapshot), 4)
        await step(made, 4)
    assert first == [["p0"], ["p1"], ["p2"], ["p3"]]
    trainer = SMALL | {"prompt_repeat_k": 3}
    async with (
        FakeSGLang(weight_version="0") as other,
        stage(engine, other, buffer=folder("new.db"), restore=folder.restore(2), trainer=trainer, ready=False) as made,
    ):
        other.answer = answered
        assert made.groups("consumed") == 2
        await made.until(lambda: made.groups("ready") == 2)
        await made.service.ready()
        again = [await made.take(step=2, groups=2), await made.take(step=3, groups=2)]
        assert sorted(ids(again[0]) + ids(again[1])) == ["p2", "p3", "p4", "p5"]
        back = {group["prompt"]["id"]: group for batch in again for group in batch["groups"]}
        assert {name: len(group["samples"]) for name, group in back.items()} == {"p4": 1, "p5": 1, "p2": 3, "p3": 3}
        assert back["p2"]["prompt"] == {"id": "p2", "input_ids": [11, 12, 13, 2], "ground_truth": 2, "meta": {"n": 2}}
        for batch in again:
            await made.service.ack(batch["batch_id"])
        assert made.groups("consumed") == made.groups("admitted") == 6


async def test_what_came_back_survives_as_well(engine: FakeSGLang, folder: Folder) -> None:
    """A service that dies before it admitted what came back has it still, once."""  # P31
    async with stage(engine, pushed=3, buffer=folder(), trainer=SMALL) as made:
        for number in range(3):
            await step(made, number)
        await made.service.checkpoint(str(folder.snapshot), 3)
    async with stage(engine, buffer=folder("new.db"), restore=folder.restore(1), trainer=SMALL, ready=False) as made:
        assert made.groups("admitted") == made.groups("consumed") == 1
    async with stage(engine, buffer=folder("new.db"), trainer=SMALL) as made:
        assert sorted(ids(await made.take(step=1, groups=2))) == ["p1", "p2"]
        await made.until(lambda: made.groups("admitted") == 3)
    async with stage(engine, buffer=folder("new.db"), trainer=SMALL) as made:
        assert made.groups("admitted") == 3


async def test_a_file_goes_on_where_it_stood(engine: FakeSGLang, folder: Folder) -> None:
    """Prompts of a file come back first, and the file goes on behind the last that was used; it may lie elsewhere."""
    places = [folder.path / name / "lines.jsonl" for name in ("here", "there")]
    for place in places:
        place.parent.mkdir()
        place.write_bytes(b"\n".join(map(orjson.dumps, lines(8))))
    prompts = [{"jsonl": str(place), "shuffle": False, "epochs": 1} for place in places]
    async with stage(engine, buffer=folder(), trainer=SMALL, prompts=prompts[0]) as made:
        done = [await step(made, number) for number in range(3)]
        await made.service.checkpoint(str(folder.snapshot), 3)
    rest = []
    restore = folder.restore(1)
    async with stage(engine, buffer=folder("new.db"), restore=restore, trainer=SMALL, prompts=prompts[1]) as made:
        for number in range(1, 8):
            rest += await step(made, number)
        with pytest.raises(NotNow) as ended:
            await made.take(step=8)
        assert ended.value.type == "exhausted"
    assert sorted(done[0] + rest) == [f"p{number}" for number in range(8)]


async def test_a_refused_restore_starts_nothing(engine: FakeSGLang, folder: Folder) -> None:
    """Where there is a journal already the service does not start, and names both files; a later start works."""
    async with stage(engine, pushed=1, buffer=folder()) as made:
        await made.service.checkpoint(str(folder.snapshot), 0)
    with pytest.raises(ConfigError, match=r"^buffer\.path: \S+journal\.db is there already, and \S+snapshot\.db"):
        async with stage(engine, buffer=folder(), restore=folder.restore()):
            raise AssertionError
    async with stage(engine, buffer=folder()) as made:
        assert await step(made, 0) == ["p0"]
