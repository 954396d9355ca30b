"""What a running service says of its memory: the accounts of its parts, its processes, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_svc.accounts import accounts_of
from rollout_svc.errors import NotNow
from rollout_svc.events import MemorySampled
from rollout_svc.service import RolloutService
from rollout_svc.tensors import MemoryStore
from rollout_svc.tensors.shards import Fetcher
from rollout_svc.tensors.shards.process import _process, fetch_buffer, install
from tests.long.test_launching import engine as launched
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import Stage, make_config, stage


def answered(call: Call) -> Reply:
    return Reply(tokens=[5, 6, call.prompt_ids[-1]])


def sampled(made: Stage) -> list[int]:
    """The steps that were looked at."""
    return [event.step for event in made.of(MemorySampled) if event.step is not None]


async def own(made: Stage) -> dict[str, Any]:
    """The accounts of the service's own process."""
    record = await made.service.memory()
    [process] = [process for process in record["processes"] if process["name"] == "service"]
    accounts: dict[str, Any] = process["accounts"]
    return accounts


async def test_the_parts_say_what_they_have(engine: FakeSGLang) -> None:
    """Live handles by kind, finished groups, requests under way: bytes while they are there, and none after."""  # P30
    async with stage(engine, pushed=2, memory={"debug": True}) as made:
        await made.until(lambda: made.groups("ready") == 2)
        handle = made.parts.handles.hold(
            MemoryStore().put(np.zeros(1000, dtype=np.uint8)), kind="experts", holder="sample s1"
        )
        found = accounts_of(made.parts)
        assert found == {"handles.experts": 1000, "replay_buffer": made.parts.buffer.bytes, "in_flight": 0}
        assert found["replay_buffer"] > 0
        record = await made.service.memory()
        assert record["handles"] == {"experts": {"handles": 1, "bytes": 1000}}
        assert record["holders"] == [{"kind": "experts", "bytes": 1000, "holder": "sample s1"}]
        handle.release("the test")
        assert "handles.experts" not in accounts_of(made.parts)
        batch = await made.take(groups=2)
        await made.service.ack(batch["batch_id"])
        assert accounts_of(made.parts)["replay_buffer"] == 0
        made.parts.pool.workers["w0"].tokens += 5
        assert accounts_of(made.parts)["in_flight"] == 180
        made.parts.pool.workers["w0"].tokens -= 5


async def test_what_this_process_fetched_is_an_account(engine: FakeSGLang) -> None:
    """A trainer beside the service that fetches shards and does not drain them: its account is there."""  # P30
    before = install(Fetcher())
    try:
        async with stage(engine) as made:
            assert accounts_of(made.parts)["fetch_buffers"] == 0
            [flight] = fetch_buffer().claim(["a"]).mine.values()
            fetch_buffer().land(flight, np.zeros(100, dtype=np.uint8), 100)
            assert (await own(made))["fetch_buffers"]["bytes"] == 100
    finally:
        _process.fetcher = before


async def test_a_step_is_a_sample_and_files_are_counted(engine: FakeSGLang, tmp_path: Path) -> None:
    """Each step is looked at once; the journal and the trajectories are as large as their files."""  # P30
    journal, lines = tmp_path / "j.db", tmp_path / "t.jsonl"
    async with stage(engine, pushed=3, buffer={"path": str(journal)}, trajectories={"path": str(lines)}) as made:
        await made.take(0)
        await made.until(lambda: sampled(made) == [0])
        await made.take(1)
        await made.until(lambda: sampled(made) == [0, 1])
        await made.until(lambda: made.groups("ready") == 1 and lines.read_bytes().count(b"\n") == 3)
        accounts = await own(made)
        assert accounts["journal_disk"]["bytes"] >= journal.stat().st_size
        assert accounts["trajectories_disk"]["bytes"] == lines.stat().st_size > 0
        assert accounts["open_files"]["bytes"] < accounts["journal_disk"]["bytes"]
        assert made.service.status()["memory"] == {
            "verdict": "too early to say: 2 of 20 steps were seen",
            "growing": [],
        }
        assert sampled(made) == [0, 1]


async def test_an_engine_that_the_service_launched_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Its row has its pid and its resident memory; when it was removed nothing of it is left."""  # P30
    async with stage(launched(tmp_path / "w0")) as made:
        record = await made.service.memory()
        [process] = [process for process in record["processes"] if process["name"] == "engine w0"]
        running = made.worker().launched
        assert running is not None
        assert process["pid"] == running.pid
        assert process["accounts"]["rss"]["bytes"] > 10**7
        await made.service.remove_worker("w0")
        await made.until(lambda: not made.parts.pool.workers)
        record = await made.service.memory()
        assert "engine w0" not in [process["name"] for process in record["processes"]]


async def test_a_service_that_was_not_started_has_no_record() -> None:
    """It says so, as with every call."""
    with pytest.raises(NotNow, match="not been started"):
        await RolloutService(make_config("http://127.0.0.1:9")).memory()
