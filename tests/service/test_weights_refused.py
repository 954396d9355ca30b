"""Weights that are refused before anything is stopped: not newer, not whole, not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.weights import calls, presence
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM
from tests.support.stage import Stage, stage

EXTERNAL = {"kind": "external"}
SHM = {"kind": "shm", "publisher": "http://127.0.0.1:9"}


async def untouched(made: Stage, engine: FakeSGLang, version: int) -> None:
    """Nothing was paused, asked or told."""
    assert (made.service.state, made.service.status()["ticket"], engine.running) == ("running", 0, 1)
    assert (made.service.status()["weight_version"], engine.updates) == (version, [])


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("source", [EXTERNAL, SHM, {"kind": "disk", "path": "/w"}])
async def test_a_version_that_is_not_greater_is_refused(version: int, source: dict[str, Any]) -> None:
    """P24 P35: of every kind, with both numbers, and before anything is paused."""
    async with FakeSGLang(weight_version="3") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(version, source, pause={})
        assert (refused.value.type, refused.value.detail) == ("old_version", {"version": version, "weight_version": 3})
        await untouched(made, engine, 3)


@pytest.mark.parametrize("version", [1, 3])
async def test_a_trainer_that_was_restarted_says_so(version: int, tmp_path: Path) -> None:
    """P24: the version the fleet has, or an earlier one, is brought where that is forced."""
    async with FakeSGLang(weight_version="3") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        source = {"kind": "disk", "path": str(tmp_path)}
        answer = await made.service.update_weights(version, source, pause={}, force=True)
        assert answer == {"version": version, "workers": {"w0": {"ok": True, "version": version}}}
        assert (made.service.state, engine.weight_version) == ("running", str(version))


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"kind": "disk", "path": "/w\0"}, "source.path"),
        ({"kind": "shm", "publisher": "http://"}, "source.publisher"),
        ({"kind": "shm", "publisher": "http://127.0.0.1:99999"}, "source.publisher"),
        ({"kind": "shm", "publisher": "http://[::1"}, "source.publisher"),
    ],
)
async def test_what_can_be_nowhere_stops_nothing(source: dict[str, Any], path: str) -> None:
    """P35: 400 at the field, and the stage runs on."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(BadRequest) as refused:
            await made.service.update_weights(1, source, pause={})
        assert [problem["path"] for problem in refused.value.detail] == [path]
        await untouched(made, engine, 0)


async def test_a_worker_that_nobody_has_is_named() -> None:
    """P24: a trainer that says whom it gave the weights, and misspells one, is told so in the answer."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        source = EXTERNAL | {"workers": ["w0", "w9"]}
        answer = await made.service.update_weights(1, source, pause={})
        assert answer["workers"] == {
            "w0": {"ok": True, "version": 1},
            "w9": {"ok": False, "skipped": "there is no such worker"},
        }


async def test_files_that_are_not_whole_are_refused_with_the_list(tmp_path: Path) -> None:
    """P24 P35: 400 with every problem, the stage runs on; once they are whole the same call goes through."""
    whole = save({"a": np.zeros(8, np.float32)})
    (tmp_path / "one.safetensors").write_bytes(whole[:-1])
    (tmp_path / "two.safetensors.tmp").write_bytes(whole)
    source = {"kind": "disk", "path": str(tmp_path)}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(BadRequest) as refused:
            await made.service.update_weights(1, source, pause={})
        assert [problem["path"] for problem in refused.value.detail] == ["source.path"] * 2
        assert "one.safetensors: its header promises" in refused.value.message
        assert "two.safetensors.tmp is still there" in refused.value.message
        await untouched(made, engine, 0)
        (tmp_path / "two.safetensors.tmp").unlink()
        (tmp_path / "one.safetensors").write_bytes(whole)
        assert (await made.service.update_weights(1, source, pause={}))["version"] == 1


async def test_not_a_number_on_disk_is_refused_where_that_was_asked_for(tmp_path: Path) -> None:
    """P35: named, before anything is stopped; not looked for otherwise."""
    save_file({"good": np.zeros(4), "bad": np.full(4, np.nan)}, tmp_path / "model.safetensors")
    source = {"kind": "disk", "path": str(tmp_path)}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(BadRequest, match=r"bad in model\.safetensors has values that are not finite"):
            await made.service.update_weights(1, source | {"check_finite": True}, pause={})
        for wrong in (source | {"check_finite": "yes"}, EXTERNAL | {"check_finite": True}):
            with pytest.raises(BadRequest, match="check_finite"):
                await made.service.update_weights(1, wrong, pause={})
        await untouched(made, engine, 0)
        assert (await made.service.update_weights(1, source, pause={}))["version"] == 1


@pytest.mark.parametrize("finite", [False, True])
async def test_a_disk_that_hangs_is_waited_for_only_so_long(
    finite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8 P35: it says nothing against the files; values that were to be looked at and could not be are refused."""
    monkeypatch.setattr(calls, "_HEADERS_S", 0.05)
    seen: list[bool] = []

    def hang(_: str, *, finite: bool, stopped: Any) -> list[str]:
        seen.append(finite)
        while not stopped():
            pass
        return ["too late"]

    monkeypatch.setattr(calls, "problems_of", hang)
    source = {"kind": "disk", "path": str(tmp_path), "check_finite": finite}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, weights={"update_timeout_s": 0.5}) as made:
        if finite:
            with pytest.raises(BadRequest, match="could not be checked in time"):
                await made.service.update_weights(1, source, pause={})
        else:
            assert (await made.service.update_weights(1, source, pause={}))["version"] == 1
        assert seen == [finite]


async def test_files_are_not_looked_at_where_that_is_switched_off(tmp_path: Path) -> None:
    """The engines see other files under that name: it is theirs to say what they are."""
    (tmp_path / "one.safetensors").write_bytes(b"")
    async with FakeSGLang(weight_version="0") as engine, stage(engine, weights={"check_files": False}) as made:
        answer = await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)}, pause={})
        assert answer["version"] == 1


MODEL = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
"""What an engine serves."""


def folder(at: Path, **tensors: Any) -> str:
    """Write a checkpoint."""
    at.mkdir()
    save_file(tensors, at / "model.safetensors")
    return str(at)


async def test_names_that_are_missing_are_refused_with_the_list(tmp_path: Path) -> None:
    """P24 P35: by what the engine was started with; nothing is stopped, and once they are there it goes through."""
    served, bad = folder(tmp_path / "base", **MODEL), folder(tmp_path / "bad", a=np.zeros((3, 2), np.float32))
    async with FakeSGLang(weight_version="0", model_path=served) as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(BadRequest) as refused:
            await made.service.update_weights(1, {"kind": "disk", "path": bad}, pause={})
        told = [problem["message"] for problem in refused.value.detail]
        assert told[1:] == ["missing b", "a: [3, 2] in place of [2, 3]"]
        assert "pass `check_names: false` if that is meant" in told[0]
        for wrong in ({"kind": "disk", "path": bad, "check_names": 0}, EXTERNAL | {"check_names": False}):
            with pytest.raises(BadRequest, match="check_names"):
                await made.service.update_weights(1, wrong, pause={})
        await untouched(made, engine, 0)
        good = {"kind": "disk", "path": folder(tmp_path / "good", **MODEL)}
        assert (await made.service.update_weights(1, good, pause={}))["version"] == 1


@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
async def test_the_last_update_says_what_the_next_has_to_have(kind: Any, tmp_path: Path) -> None:
    """P24 P35: an engine that takes less without a word is not asked; what failed is nobody's measure."""
    first, bad = folder(tmp_path / "first", **MODEL), folder(tmp_path / "bad", b=MODEL["b"])
    async with kind(weight_version="0") as engine, stage(engine) as made:
        engine.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, {"kind": "disk", "path": bad}, pause={})
        engine.fail_update = False
        await made.service.update_weights(1, {"kind": "disk", "path": first}, pause={})
        assert made.worker().state is WorkerState.ACTIVE
        asked = list(engine.updates)
        with pytest.raises(BadRequest, match="missing a"):
            await made.service.update_weights(2, {"kind": "disk", "path": bad}, pause={})
        assert (made.service.status()["weight_version"], engine.updates) == (1, asked)
        meant = {"kind": "disk", "path": bad, "check_names": False}
        for version in (2, 3):  # the second passes as well without a word: it has what the first had
            await made.service.update_weights(version, meant, pause={})
            meant.pop("check_names", None)


async def test_names_are_not_compared_where_files_are_not_looked_at(tmp_path: Path) -> None:
    """P35: `check_files: false` leaves names to the engines as well."""
    served, bad = folder(tmp_path / "base", **MODEL), folder(tmp_path / "bad", a=MODEL["a"])
    async with (
        FakeSGLang(weight_version="0", model_path=served) as engine,
        stage(engine, weights={"check_files": False}) as made,
    ):
        source = {"kind": "disk", "path": bad, "check_finite": True}
        assert (await made.service.update_weights(1, source, pause={}))["version"] == 1


async def test_one_that_is_not_let_in_holds_an_update_up_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8 P24: it has the weights, and the answer says so; that it still waits for its supervisor is its reason."""
    monkeypatch.setattr(presence, "_LOOK_S", 0.05)
    source = {"kind": "disk", "path": folder(tmp_path / "first", **MODEL)}
    async with FakeVLLM(weight_version="0") as engine, stage(engine) as made:
        engine.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, source, pause={})
        engine.fail_update = False
        made.parts.supervisor.hold()  # as a pause does that climbs meanwhile
        answer = await made.service.update_weights(1, source)
        assert answer["workers"] == {"w0": {"ok": True, "version": 1}}
        assert made.worker().state is WorkerState.QUARANTINED
        assert made.worker().reason == "it has version 1, and is looked at"
        made.parts.supervisor.release()
        await made.service.update_weights(2, source)
        assert made.worker().state is WorkerState.ACTIVE
