"""Engines that are launched into a placement group: looked up before each start, and without holding anything up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.events import EngineDoubted, EngineExited, EngineStarted
from rollout_svc.launching import policy
from rollout_svc.startup import StartFailed
from rollout_svc.workers.placement import Bundle, PlacementGroup
from tests.support.stage import stage


class Groups:
    """Has a group of so many bundles, of as many as the next number says each time; answers when it may."""

    def __init__(self, *bundles: int) -> None:
        self.bundles = list(bundles)
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()

    async def find(self, name: str) -> PlacementGroup:
        self.asked.set()
        await self.may.wait()
        return PlacementGroup(name, (Bundle({"GPU": 1.0}),) * self.bundles.pop(0))


def engine(folder: Path, restarts: int = 0, **placed: Any) -> dict[str, Any]:
    """An engine that writes down its bundles, a line at each start, and ends."""
    write = f'echo "<$LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES>" >> {folder / "told"}'
    settings = {"bundles": [3, 1], "tensor_parallel": 2, "group": "trainer"} | placed
    command = ["sh", "-c", write, "{port}"]
    return {"launch": {"command": command, "log_dir": str(folder), "restarts": restarts, "placement": settings}}


def told(folder: Path) -> list[str]:
    """What was written down."""
    path = folder / "told"
    return path.read_text().splitlines() if path.exists() else []


async def test_each_start_looks_at_the_group_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: one that has shrunk meanwhile is refused, with all that is wrong, at its place in the configuration."""
    monkeypatch.setattr(policy, "BASE_S", 0.01)
    groups = Groups(4, 1)
    async with stage(engine(tmp_path, restarts=1), groups=groups, ready=False) as made:
        with pytest.raises(StartFailed) as raised:
            await made.service.ready()
        assert len(made.of(EngineStarted)) == 1
        assert told(tmp_path) == ["<3,1>"]
        assert str(raised.value).startswith(
            "workers.0.launch: its process could not be started: bundles [3, 1] of placement group 'trainer': "
            "placement.bundles.0: 3 is no bundle of the group: it has 1, counted from 0; placement.bundles.1: 1 is no"
        )


async def test_an_engine_that_owns_its_group_gets_no_list_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting is ignored, with one remark at its place; no group is looked for, and no list is inherited."""
    monkeypatch.setenv("LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES", "7")
    groups = Groups(4)
    async with stage(engine(tmp_path, owns_group=True), groups=groups, ready=False) as made:
        await made.until(lambda: bool(made.of(EngineExited)), "it is over")
        assert told(tmp_path) == ["<>"]
        [remark] = made.of(EngineDoubted)
        assert remark.path == "workers.0.launch.placement"
        assert remark.message.startswith("ignored: the engine owns its placement group")
        assert not groups.asked.is_set()


@pytest.mark.parametrize("leaves", ["worker", "service"])
async def test_nothing_is_started_for_who_left_meanwhile(tmp_path: Path, leaves: str) -> None:
    """A cluster may take its time: a worker that was removed, or a service that stops, has no process afterwards."""
    groups = Groups(4)
    groups.may.clear()
    async with stage(engine(tmp_path), groups=groups, ready=False) as made:
        await groups.asked.wait()
        if leaves == "worker":
            await made.service.remove_worker("w0")
            await made.until(lambda: not made.service.workers(), "it is forgotten")
        else:
            made.parts.launching.hold()
        [keeper] = [task for task in made.parts.tasks.live if task.get_name() == "launch:w0"]
        groups.may.set()
        await asyncio.wait({keeper})
        assert not made.of(EngineStarted)
    assert not told(tmp_path)


async def test_a_cluster_that_does_not_answer_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    """The service stops while a group is looked for that never comes."""
    groups = Groups(4)
    groups.may.clear()
    async with stage(engine(tmp_path), groups=groups, ready=False) as made:
        await groups.asked.wait()
    assert not made.of(EngineStarted)
