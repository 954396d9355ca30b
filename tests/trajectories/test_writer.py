"""Trajectories: written once each, in order, by a thread of their own; a disk that is slow or broken stops nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from blockbuster import blockbuster_ctx

from rollout_svc.config import TrajectoriesConfig
from rollout_svc.events import Event, EventBus, GroundTruthMissing, TrajectoriesFailing
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SampleStatus
from rollout_svc.trajectories import LineFile, Trajectories
from rollout_svc.trajectories.writer import CLOSE_S, MOST_LINES, PATIENCE_S
from tests.support.bell import WAIT_S, Bell
from tests.support.groups import make_prompt, run_to
from tests.support.virtual import soon, virtual


class Disk(LineFile):
    """A file that waits for `go_on` before every line, and fails while `broken` says how."""

    def __init__(self) -> None:
        self.trouble = None
        self.lines: list[dict[str, Any]] = []
        self.broken: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.came = threading.Semaphore(0)
        self.closed = False

    def append(self, line: bytes) -> None:
        self.came.release()
        self.go_on.wait(WAIT_S)
        if self.broken is not None:
            raise self.broken
        assert line.endswith(b"}\n")
        self.lines.append(orjson.loads(line))

    def close(self) -> None:
        self.closed = True


class Desk:
    """Trajectories over such a disk, and what they say."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.bus, self.bell = EventBus(), Bell()
        self.told: list[Event] = []
        for kind in (GroundTruthMissing, TrajectoriesFailing):
            self.bus.subscribe(kind, self._told)
        config = TrajectoriesConfig(path="/nowhere/t")
        self.trajectories = Trajectories(config, bus=self.bus, wall=lambda: 1000.0, make_file=lambda _: self.disk)

    def _told(self, event: Event) -> None:
        self.told.append(event)

    @property
    def status(self) -> dict[str, Any]:
        status = self.trajectories.as_json()
        assert status is not None
        return status

    def failing(self) -> list[TrajectoriesFailing]:
        return [event for event in self.told if isinstance(event, TrajectoriesFailing)]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the thread was heard: each line it is done with takes a turn of the loop."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.to_thread(lambda: None)

    async def record(self, *numbers: int) -> None:
        for number in numbers:
            await self.trajectories.record(finished(number))


def finished(number: int, prompt: Prompt | None = None) -> Group:
    """Make a group whose members are all COMPLETED."""
    given = prompt or make_prompt(ground_truth="yes", content="what?")
    group = Group(group_id=f"g{number}", prompt=given, size=2, lane="train", ledger=Ledger(), now=0.0)
    group.start()
    for index, sample in enumerate(group.samples):
        run_to(sample, SampleStatus.COMPLETED, reward=float(index))
    return group


async def test_a_line_says_everything_of_its_group() -> None:
    """Prompt, ground truth, answers with tokens, rewards, statuses, versions and times, as JSON."""
    desk = Desk()
    group = finished(0)
    group.samples[0].generate_s, group.samples[0].judge_s = 1.5, 0.25
    await desk.trajectories.record(group)
    await desk.trajectories.close()
    [line] = desk.disk.lines
    one, other = line.pop("samples")
    assert line.pop("created_at") <= line["finished_at"] == 1000.0
    assert line == {
        "group_id": "g0",
        "task": "t",
        "prompt": {"id": "p", "text": "what?", "input_ids": [1, 2, 3], "ground_truth": "yes", "meta": {}},
        "ground_truth": "yes",
        "finished_at": 1000.0,
        "hand_backs": 0,
    }
    assert one == orjson.loads(group.samples[0].packed or b"") | {"generate_s": 1.5, "judge_s": 0.25}
    assert (one["status"], one["reward"], one["response_ids"]) == ("COMPLETED", 0.0, [7, 8])
    assert (other["reward"], other["generate_s"], other["judge_s"]) == (1.0, None, None)
    assert not desk.told


async def test_a_group_is_written_once() -> None:
    """A put that is begun again finds its group written already."""
    desk = Desk()
    group = finished(0)
    await desk.trajectories.record(group)
    await desk.trajectories.record(group)
    await desk.trajectories.close()
    assert len(desk.disk.lines) == 1
    assert (desk.status["written"], desk.status["failed"]) == (1, 0)
    assert desk.status["bytes"] > 100
    assert desk.disk.closed


async def test_without_a_path_nothing_happens() -> None:
    """Where none are kept, nothing is begun, said or closed."""
    trajectories = Trajectories(TrajectoriesConfig(), bus=EventBus())
    group = finished(0)
    before = threading.active_count()
    await trajectories.record(group)
    await trajectories.close()
    assert (trajectories.as_json(), group.recorded, threading.active_count()) == (None, False, before)


async def test_a_missing_ground_truth_is_null_and_warned_about_once_per_task() -> None:
    """It is written as null, never an error, and said once for each task."""
    desk = Desk()
    for number, task in enumerate(("a", "b", "a", "b")):
        await desk.trajectories.record(finished(number, make_prompt(task=task)))
    await desk.record(9)
    await desk.trajectories.close()
    assert [line["ground_truth"] for line in desk.disk.lines] == [None] * 4 + ["yes"]
    assert desk.told == [GroundTruthMissing("a", "p"), GroundTruthMissing("b", "p")]


async def test_the_loop_never_waits_and_a_put_waits_for_room() -> None:
    """A slow disk: lines up to the bound are taken at once, then puts wait in turn, and none is lost."""
    desk = Desk()
    desk.disk.go_on.clear()
    await desk.record(*range(MOST_LINES))
    waiting = [asyncio.get_running_loop().create_task(desk.record(MOST_LINES + n)) for n in range(5)]
    await soon()
    assert not any(task.done() for task in waiting)
    waiting[1].cancel()
    await soon()
    assert waiting[1].cancelled()
    desk.disk.go_on.set()
    await asyncio.gather(*(task for task in waiting if not task.cancelled()))
    await desk.trajectories.close()
    kept = [*range(MOST_LINES + 1), *range(MOST_LINES + 2, MOST_LINES + 5)]
    assert [line["group_id"] for line in desk.disk.lines] == [f"g{n}" for n in kept]
    assert not desk.told


async def test_the_loop_touches_no_disk(tmp_path: Path) -> None:
    """P8: with real files, rotation and the end included, nothing blocks the loop that hands the groups over."""
    config = TrajectoriesConfig(path=str(tmp_path / "t"), max_file_bytes=1024)
    trajectories = Trajectories(config, bus=EventBus())
    with blockbuster_ctx():
        for number in range(40):
            await trajectories.record(finished(number))
        await trajectories.close()
    status = trajectories.as_json()
    assert status is not None
    assert (status["written"], status["failed"]) == (40, 0)


async def test_a_put_that_is_cut_while_it_waits_writes_nothing() -> None:
    """A pause that takes a group back before it was handed over leaves it to be written by the next put."""
    desk = Desk()
    desk.disk.go_on.clear()
    await desk.record(*range(MOST_LINES))
    group = finished(1000)
    task = asyncio.get_running_loop().create_task(desk.trajectories.record(group))
    await soon()
    task.cancel()
    await asyncio.wait({task})
    assert not group.recorded
    desk.disk.go_on.set()
    await desk.trajectories.record(group)
    await desk.trajectories.close()
    assert [line["group_id"] for line in desk.disk.lines].count("g1000") == 1


async def test_a_right_to_room_that_nobody_uses_goes_on() -> None:
    """One that is cancelled in the step in which it was let in lets in the next."""
    desk = Desk()
    desk.disk.go_on.clear()
    await desk.record(*range(MOST_LINES))
    first, second = (asyncio.get_running_loop().create_task(desk.record(n)) for n in (1000, 1001))
    await soon()
    for _ in range(MOST_LINES):  # all are written, and the loop hears of it in one turn
        desk.trajectories._wrote(1, None, None)
    first.cancel()
    await asyncio.wait({first, second}, timeout=WAIT_S)
    assert first.cancelled()
    assert second.done()
    assert not desk.trajectories._waiting
    desk.disk.go_on.set()
    await desk.trajectories.close()


@virtual
async def test_a_disk_that_takes_nothing_is_given_up() -> None:
    """Who waits longer than `PATIENCE_S` goes on without, counted and told; later ones do not wait at all."""  # P8
    desk = Desk()
    trajectories = desk.trajectories
    trajectories._handed_over.extend([1] * MOST_LINES)  # a thread that hangs would stop the clock
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(desk.record(n) for n in range(3)))
    assert loop.time() - started == PATIENCE_S
    await desk.record(3)
    assert loop.time() - started == PATIENCE_S
    assert desk.status["failed"] == 4
    assert [event.failed for event in desk.failing()] == [1]
    assert "slower" in desk.failing()[0].error
    trajectories._wrote(1, None, None)  # it moves again
    task = loop.create_task(desk.record(4))
    await soon()
    assert task.done()
    await trajectories.close()


async def test_a_broken_disk_is_told_once_and_again_after_it_worked() -> None:
    """Lines that cannot be written are counted, and training goes on; what comes later is written."""
    desk = Desk()
    desk.disk.broken = OSError(28, "No space left on device", "/nowhere/t")
    await desk.record(0, 1, 2)
    await desk.until(lambda: desk.status["failed"] == 3)
    assert [event.error for event in desk.failing()] == ["No space left on device: /nowhere/t"]
    desk.disk.broken = None
    await desk.record(3)
    await desk.until(lambda: desk.status["written"] == 1)
    desk.disk.broken = ValueError("something else")
    await desk.record(4)
    await desk.until(lambda: desk.status["failed"] == 4)
    assert [event.failed for event in desk.failing()] == [1, 4]
    await desk.trajectories.close()
    assert [line["group_id"] for line in desk.disk.lines] == ["g3"]


async def test_trouble_with_setting_aside_is_told_and_loses_nothing() -> None:
    """A file that goes on growing is said, once."""
    desk = Desk()
    desk.disk.trouble = OSError(13, "Permission denied", "/nowhere/t.1")
    await desk.record(0, 1)
    await desk.trajectories.close()
    [event] = desk.failing()
    assert event == TrajectoriesFailing("/nowhere/t", "cannot set the file aside: Permission denied: /nowhere/t.1", 0)
    assert (desk.status["written"], desk.status["failed"]) == (2, 0)


async def test_closing_writes_what_is_left() -> None:
    """Everything that was handed over is in the file when it is closed; closing twice is closing once."""
    desk = Desk()
    desk.disk.go_on.clear()
    await desk.record(*range(50))
    closing = asyncio.get_running_loop().create_task(desk.trajectories.close())
    await soon()
    assert not closing.done()
    desk.disk.go_on.set()
    await closing
    await desk.trajectories.close()
    assert len(desk.disk.lines) == 50
    await desk.record(50)
    assert (desk.status["written"], desk.status["failed"]) == (50, 1)


@virtual
async def test_closing_is_bounded() -> None:
    """A disk that takes nothing holds up no end for longer than `CLOSE_S`; what is lost is told."""  # P14
    desk, before = Desk(), set(threading.enumerate())
    desk.disk.go_on.clear()
    await desk.record(0, 1)
    [thread] = set(threading.enumerate()) - before
    loop = asyncio.get_running_loop()
    started = loop.time()
    await desk.trajectories.close()
    assert loop.time() - started == CLOSE_S
    assert desk.status["failed"] == 2
    assert "after the service stopped" in desk.failing()[0].error
    desk.disk.go_on.set()
    thread.join(WAIT_S)
    await soon()
    assert (desk.status["written"], desk.status["failed"]) == (0, 2)


def inside(folder: Path) -> list[Path]:
    """What is in a folder."""
    return sorted(folder.iterdir())


async def test_real_files_are_turned_and_gone_on_with(tmp_path: Path) -> None:
    """Two lives over one path: appended to, set aside by size, as many kept as were asked for."""
    path = tmp_path / "t.jsonl"
    config = TrajectoriesConfig(path=str(path), max_file_bytes=2048, max_files=3)
    for life in range(2):
        trajectories = Trajectories(config, bus=EventBus())
        for number in range(10):
            await trajectories.record(finished(10 * life + number))
        await trajectories.close()
        status = trajectories.as_json()
        assert status is not None
        assert (status["written"], status["failed"]) == (10, 0)
    found = [path.with_name("t.jsonl.2"), path.with_name("t.jsonl.1"), path]
    ids = [orjson.loads(line)["group_id"] for one in found for line in one.read_bytes().splitlines()]
    assert ids == [f"g{n}" for n in range(20 - len(ids), 20)]
    assert inside(tmp_path) == sorted(found)


@pytest.mark.parametrize("where", ["no/t", "."])
async def test_a_path_that_went_bad_is_told(tmp_path: Path, where: str) -> None:
    """A folder that is gone since the start is trouble to be told, and nothing else."""
    events: list[TrajectoriesFailing] = []
    bus = EventBus()
    bus.subscribe(TrajectoriesFailing, events.append)
    trajectories = Trajectories(TrajectoriesConfig(path=str(tmp_path / where)), bus=bus)
    await trajectories.record(finished(0))
    await trajectories.close()
    assert [event.failed for event in events] == [1]
