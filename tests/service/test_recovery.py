"""A service that dies at any moment and another on the same journal: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.buffer.journal import Journal
from rollout_svc.buffer.journal.reading import read_journal
from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.errors import BadRequest, ConfigError, Conflict, NotNow
from rollout_svc.sample.state import SampleState
from rollout_svc.service import RolloutService
from tests.support.answers import ids
from tests.support.answers import its_number as answered
from tests.support.fake_sglang import FakeSGLang, Status
from tests.support.stage import Stage, lines, make_config, stage


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


async def test_later_weights_at_the_engines_end_nothing_before_the_trainer_has_asked(disk: Disk) -> None:
    """A trainer that went back has its weights still to load: what its next step can take is gone on with."""  # P31
    engine = FakeSGLang(weight_version="0")
    async with engine, stage(streaming(engine), pushed=2, buffer=disk(), journal={"partial_interval_s": 0.01}) as made:
        await engine.wait_running(2)
        engine.release(engine.calls("running")[0], tokens=[1])
        await made.service.ack((await made.take(step=0))["batch_id"])
        engine.advance(engine.calls("running")[0], 3)
        await written(made, lambda state: len(state.segments) == 1 and len(state.segments[0].ids) == 3)
        await disk.dies(made)
    later = FakeSGLang(weight_version="3")
    async with later, stage(streaming(later), buffer=disk()) as made:
        await later.wait_running(1)
        assert made.parts.fleet.version == 3
        later.release(tokens=[7])
        [record] = (await made.take(step=1))["groups"][0]["samples"]
        assert [span["version"] for span in record["weight_versions"]] == [0, 3]
    assert made.groups("expired") == 0


async def test_an_id_that_no_journal_can_hold_is_refused(engine: FakeSGLang, disk: Disk) -> None:
    """It is said to whoever pushed it, at its field: admitted, it would end this life and every one after it."""  # P35
    async with stage(engine, buffer=disk()) as made:
        with pytest.raises(BadRequest, match="whole numbers") as refused:
            await made.push([{"id": "large", "input_ids": [1, 2**63]}])
        assert [problem["path"] for problem in refused.value.detail] == ["prompts.0.input_ids"]
        assert await made.push([{"id": "largest", "input_ids": [1, 2**63 - 1]}]) == 1
        assert ids(await made.take()) == ["largest"]


def streaming(engine: FakeSGLang) -> dict[str, Any]:
    """The engine as a worker that streams."""
    return {"url": engine.url, "stream": True}


async def test_a_sample_under_way_goes_on_from_what_had_come(disk: Disk) -> None:
    """Tokens that a worker had streamed are the prefix of the next life's call, and in the batch once."""  # P31
    engine = FakeSGLang(weight_version="0")
    async with engine, stage(streaming(engine), pushed=1, buffer=disk(), journal={"partial_interval_s": 0.01}) as made:
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 3)
        before = await written(made, lambda state: len(state.segments) == 1 and len(state.segments[0].ids) == 3)
        await disk.dies(made)
    [segment] = before.segments
    second = FakeSGLang(weight_version="0")
    async with second, stage(streaming(second), buffer=disk()) as made:
        assert made.service.recovered["partial_samples"] == 1
        await second.wait_running(1)
        [call] = second.calls("running")
        assert call.prompt_ids[-3:] == segment.ids
        assert call.max_new_tokens == 16 - 3
        second.release(tokens=[7, 8])
        [record] = (await made.take())["groups"][0]["samples"]
        assert record["response_ids"] == [*segment.ids, 7, 8]
        assert record["logprobs"][:3] == segment.logprobs
        assert made.parts.tally.continued == 1


async def written(made: Stage, holds: Callable[[SampleState], bool]) -> SampleState:
    """Wait until the journal has the one sample as it should be, and return it."""
    journal = made.parts.storage
    assert isinstance(journal, Journal)
    async with asyncio.timeout(10):
        while True:
            found = await journal.writer.run(read_journal)
            state = found.groups[0].samples[0]
            if holds(state):
                return state
            await asyncio.sleep(0.01)


async def test_a_file_goes_on_at_its_position(engine: FakeSGLang, disk: Disk, tmp_path: Path) -> None:
    """Over two lives each line of a file is used once per pass, whatever was read ahead."""  # P1 P31
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines(6)))
    sections: dict[str, Any] = {
        "prompts": {"jsonl": str(file), "shuffle": True, "seed": 3, "epochs": 2},
        "trainer": {"train_batch_size": 2},
    }
    seen: list[str] = []
    async with stage(engine, buffer=disk(), **sections) as made:
        batch = await made.take(step=0, groups=2)
        await made.service.ack(batch["batch_id"])
        seen += ids(batch)
        await disk.dies(made)
    async with stage(engine, buffer=disk(), **sections) as made:
        for _ in range(5):
            batch = await made.take(step=0, groups=2)
            await made.service.ack(batch["batch_id"])
            seen += ids(batch)
        assert made.groups("consumed") == 12
    assert Counter(seen) == dict.fromkeys((f"p{n}" for n in range(6)), 2)


async def test_the_rest_of_a_lease_counts(engine: FakeSGLang, disk: Disk) -> None:
    """A lease that ended while nobody lived ends at the start: its groups are ready, and its ack comes too late."""
    async with stage(engine, pushed=2, buffer=disk() | {"lease_s": 0.2}) as made:
        batch = await made.take(step=0, groups=2)
        await disk.dies(made)
        await made.until(lambda: made.groups("ready") == 2)
    async with stage(engine, buffer=disk() | {"lease_s": 0.2}, ready=False) as made:
        await made.until(lambda: made.groups("ready") == 2)
        with pytest.raises(Conflict, match="has ended"):
            await made.service.ack(batch["batch_id"])
        again = await made.take(step=0, groups=2)
        assert ids(again) == ids(batch)
        assert again["batch_id"] != batch["batch_id"]


async def test_a_judge_under_way_is_asked_again(engine: FakeSGLang, disk: Disk) -> None:
    """An answer whose judge had not answered goes straight to its judge in the next life: nothing is generated."""
    async with stage(engine, pushed=1, buffer=disk(), journal={"partial_interval_s": 0.01}) as made:
        made.judge.hold = True
        await made.until(lambda: made.judge.held == 1)
        await written(made, lambda state: state.status == "ABORTED" and state.resume_at == "judge")
        await disk.dies(made)
        made.judge.release()
    requests = len(engine.requests)
    async with stage(engine, buffer=disk()) as made:
        assert ids(await made.take()) == ["p0"]
    assert len(engine.requests) == requests


async def test_totals_and_attempts_go_on(engine: FakeSGLang, disk: Disk) -> None:
    """The ledger of the second life counts what the first one settled, and a sample's failures are not forgotten."""
    async with stage(engine, pushed=2, buffer=disk()) as made:
        batch = await made.take(step=0, groups=2)
        await made.service.ack(batch["batch_id"])
        engine.answer = lambda _: Status(400)
        await made.push(1, first=2)
        await made.until(lambda: made.groups("failed") == 1)
        before = made.parts.ledger.as_json()
        await disk.dies(made)
    async with stage(engine, buffer=disk(), ready=False) as made:
        assert made.parts.ledger.as_json() == before


async def test_a_journal_of_other_settings_is_refused_and_stays_as_it_is(
    engine: FakeSGLang, disk: Disk, tmp_path: Path
) -> None:
    """The start says which task differs, at `buffer.path`, starts nothing, and changes no byte."""  # P35
    async with stage(engine, pushed=1, buffer=disk()) as made:
        await made.take()
    before = disk.path.read_bytes()
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(orjson.dumps(lines(1)[0]))
    service = RolloutService(make_config(engine, buffer=disk(), prompts={"jsonl": str(file)}))
    with pytest.raises(ConfigError, match="task 't', prompts: push in the journal, jsonl in the configuration") as told:
        await service.start()
    assert told.value.problems[0].path == "buffer.path"
    await service.stop()
    assert disk.path.read_bytes() == before


async def test_two_services_do_not_share_a_journal(engine: FakeSGLang, disk: Disk) -> None:
    """The second is refused at its start, and the first goes on."""
    async with stage(engine, pushed=1, buffer=disk()) as made:
        with pytest.raises(ConfigError, match="in use"):
            await RolloutService(make_config(engine, buffer=disk())).start()
        assert ids(await made.take()) == ["p0"]


async def test_a_batch_that_is_ready_is_lent_and_told_in_no_time(engine: FakeSGLang, disk: Disk) -> None:
    """The disk is waited for, however little time the take has: a batch is lent and handed over, or neither."""
    async with stage(engine, pushed=1, buffer=disk()) as made:
        await made.until(lambda: made.groups("ready") == 1)
        assert ids(await made.take(timeout_s=0.0)) == ["p0"]


async def test_a_full_disk_fails_the_service_at_once_and_tears_nothing(engine: FakeSGLang, disk: Disk) -> None:
    """A write that fails is told with its reason; takes fail instead of waiting; the file is what it was."""  # P23
    async with stage(engine, pushed=1, buffer=disk()) as made:
        made.may_die = True
        await made.take(step=0)
        journal = made.parts.storage
        assert isinstance(journal, Journal)
        await disk.dies(made)
        await journal.writer.run(lambda connection: connection.execute("PRAGMA max_page_count=1"))
        waiting = made.start(made.take(step=1, groups=2))
        big = [{"id": f"big{n}", "input_ids": [1], "meta": {"text": "x" * 100_000}} for n in range(20)]
        with pytest.raises(JournalFailed, match="full") as refused:
            await made.push(big)
        assert (refused.value.status, refused.value.type) == (503, "failed")
        with pytest.raises(NotNow, match="full"):
            await waiting
        with pytest.raises(NotNow, match="full"):
            await made.service.put_prompts("t", lines(1, 50))
        assert made.service.state == "failed"
    async with stage(engine, buffer=disk(), ready=False) as made:
        assert made.groups("leased") == 1
        assert len(made.source) == 0


@pytest.mark.parametrize("tail", [None, 2])
async def test_a_prompt_that_waits_to_be_admitted_once_more_is(
    engine: FakeSGLang, disk: Disk, tail: int | None
) -> None:
    """In the tail; and before its source where the next life has no tail. Once admitted it waits no more."""  # P1 P31
    again = "INSERT INTO again (task, prompt_id, prompt, ids) SELECT task, 'late', prompt, ids FROM groups"
    async with stage(engine, pushed=1, buffer=disk()) as made:
        await made.until(lambda: made.groups("ready") == 1)
        journal = made.parts.storage
        assert isinstance(journal, Journal)
        await journal.writer.run(lambda connection: connection.execute(again))
        await disk.dies(made)
    async with stage(engine, buffer=disk(), producer={"tail_batch_size": tail}) as made:
        batch = await made.take(groups=2)
        assert sorted(ids(batch)) == ["late", "p0"]
        await made.service.ack(batch["batch_id"])
        await disk.dies(made)
    async with stage(engine, buffer=disk(), ready=False) as made:
        assert made.parts.producer.exhausted is False
        assert made.parts.ledger.unsettled_groups == 0
        assert made.parts.producer.tail.prompts() == []
        assert made.groups("consumed") == 2


@pytest.mark.parametrize(
    ("found", "gone", "version", "loaded"), [("0", False, 1, 1), ("5", False, 5, 0), ("0", True, 0, 0)]
)
async def test_engines_are_brought_to_the_weights_of_the_life_before(
    disk: Disk, tmp_path: Path, *, found: str, gone: bool, version: int, loaded: int
) -> None:
    """P19 P31: before any traffic, where the files are there still; an engine that has newer ones is followed."""
    weights = tmp_path / "weights"
    weights.mkdir()
    async with FakeSGLang(weight_version="0") as engine, stage(engine, buffer=disk()) as made:
        source = {"kind": "disk", "path": str(weights), "check_names": False}
        await made.service.update_weights(1, source, pause={})
        await disk.dies(made)
    if gone:
        weights.rmdir()
    async with FakeSGLang(weight_version=found) as engine:
        engine.answer = answered
        async with stage(engine, pushed=1, buffer=disk()) as made:
            batch = await made.take(step=version, groups=1)
            spans = batch["groups"][0]["samples"][0]["weight_versions"]
            assert [span["version"] for span in spans] == [version]
            assert len(engine.updates) == loaded
