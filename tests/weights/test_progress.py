"""How far an update is: told while it goes, and once at the end."""

from __future__ import annotations

import asyncio
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.events import EventBus, WeightsProgress, WeightUpdateEnded
from rollout_svc.observe.terminal import show_status
from rollout_svc.observe.weight_bar import show_weights
from rollout_svc.weights.bar import Bar, line
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.progress import telling
from rollout_svc.weights.publisher import WeightPublisher
from tests.embedded.helpers import served, small_model
from tests.support.fake_sglang import FakeSGLang, Hang
from tests.support.stage import stage
from tests.support.virtual import virtual


@virtual
async def test_progress_is_told_twice_a_second_and_its_last_word_is_not_lost() -> None:
    """A thousand changes in 2 s are five words, and what changed after the last of them is told half a second later."""
    told: list[tuple[float, WeightsProgress]] = []
    ended: list[WeightUpdateEnded] = []
    bus, loop = EventBus(), asyncio.get_running_loop()
    began = loop.time()
    bus.subscribe(WeightsProgress, lambda event: told.append((loop.time() - began, event)))
    bus.subscribe(WeightUpdateEnded, ended.append)
    phases = Phases(loop.time)
    with telling(bus, 3, "shm", phases):
        phases.expect(4000)
        with phases.during("load"):
            for _ in range(1000):
                phases.staged(4)
                await asyncio.sleep(0.002)
            phases.staged(0)
            await asyncio.sleep(10.0)
    assert [at for at, _ in told] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], abs=0.01)
    last = told[-1][1]
    assert (last.phase, last.buckets, last.bytes, last.total_bytes) == ("load", 1001, 4000, 4000)
    assert [event.ok for event in ended] == [True]
    assert ended[0].phases == pytest.approx({"load": 12.0}, abs=0.01)


async def test_status_tells_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P9: an engine that hangs is seen to hang: the phase, and the seconds so far; afterwards it is idle again."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.script("/update_weights_from_disk", Hang())
        updating = made.start(made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)}, pause={}))
        await engine.wait_hits("/update_weights_from_disk", 1)
        weights = made.service.status()["weights"]
        show_status(made.service.status())
        assert (weights["state"], weights["phase"], weights["version"]) == ("updating", "load", 0)
        assert weights["seconds"] > 0
        assert "load now" in capsys.readouterr().out
        assert made.of(WeightsProgress)[0].phase == "pause"
        assert not made.of(WeightUpdateEnded)
        engine.heal()
        await updating
        assert made.service.status()["weights"]["state"] == "idle"
        assert list(made.of(WeightUpdateEnded)[-1].phases) == ["pause", "load", "confirm", "resume"]


async def test_an_update_that_fails_has_an_end_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error is told once, and kept in the status until the next; what was refused at once never began."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        source: dict[str, Any] = {"kind": "disk", "path": str(tmp_path)}
        with pytest.raises(Conflict):
            await made.service.update_weights(1, source)
        with pytest.raises(BadRequest):
            await made.service.update_weights(1, {**source, "probe": {}}, pause={})
        assert not made.of(WeightUpdateEnded)
        engine.fail_update = True
        with pytest.raises(NotNow) as failed:
            await made.service.update_weights(1, source, pause={})
        [ended] = made.of(WeightUpdateEnded)
        assert (ended.ok, ended.error) == (False, str(failed.value))
        assert list(ended.phases) == ["pause", "load", "confirm"]  # asked which version it has now
        assert made.service.status()["weights"]["error"] == str(failed.value)
        show_status(made.service.status())
        assert f"the update failed: {failed.value}" in capsys.readouterr().out
        engine.fail_update = False
        await made.service.update_weights(1, source)
        assert made.service.status()["weights"]["error"] == ""


def test_a_terminal_shows_a_bar() -> None:
    """From the first word to the end, with what is known of the bytes; then it is gone."""
    bus, out = EventBus(), io.StringIO()
    show_weights(bus, Console(file=out, force_terminal=True, width=120))
    bus.emit(WeightUpdateEnded(1, "disk", True, 0.1, {}, 0, 0, ""))
    assert not out.getvalue()
    bus.emit(WeightsProgress(1, "shm", "load", 2, 2**20, 2**21, 1.0))
    bus.emit(WeightUpdateEnded(1, "shm", True, 2.0, {}, 4, 2**21, ""))
    shown = out.getvalue()
    assert "weights 1 by shm: load, 2 buckets" in shown
    assert "1.0/2.0 MiB" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


@given(st.integers(0, 2**50), st.none() | st.integers(0, 2**50), st.integers(0, 10**6), st.floats(0, 10**6))
def test_a_line_says_how_far_it_is(done: int, total: int | None, buckets: int, seconds: float) -> None:
    """Whatever the numbers are: one line, at most whole."""
    text = line("weights 3", done, total, buckets, seconds)
    assert text.startswith("weights 3: ")
    assert f"{buckets} buckets" in text
    assert "\n" not in text
    if total is not None:
        assert int(text.split()[2].rstrip("%")) <= 100
        assert text.count("#") + text.count(".", text.index("|"), text.rindex("|")) == 24


def test_a_bar_is_written_over_and_ended_once() -> None:
    """Ten times a second at most; a shorter line leaves nothing of a longer one."""
    now, out = [0.0], io.StringIO()
    bar = Bar(out, "weights 3", 1000, lambda: now[0])
    for _ in range(100):
        now[0] += 0.01
        bar.loaded(10)
    bar.close()
    bar.close()
    words = out.getvalue().removesuffix("\n").split("\r")[1:]
    assert 10 <= len(words) <= 13
    assert words[0].startswith("weights 3:   0%")
    assert words[-1].startswith("weights 3: 100%")
    assert out.getvalue().count("\n") == 1
    assert all(len(later) >= len(before.rstrip()) for before, later in pairwise(words))


async def test_a_trainer_sees_a_bar_where_it_looks(capsys: pytest.CaptureFixture[str]) -> None:
    """Off where standard error is no terminal; on where that is asked for, up to all of it."""
    wanted = small_model(seed=1).state_dict()
    async with (
        served(is_open=True) as engine,
        stage(str(engine.session._base_url)) as made,
        WeightPublisher(made.service) as publisher,
    ):
        await publisher.publish(wanted, 1, pause={})
        assert not capsys.readouterr().err
        await publisher.publish(wanted, 2, pause={}, progress=True)
        err = capsys.readouterr().err
    assert err.startswith("\rweights 2:   0%")
    assert "weights 2: 100%" in err
    assert err.endswith("\n")
