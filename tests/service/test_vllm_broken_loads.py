"""A vLLM that kept what a failed load began would count it into the next one: it is made to forget it."""

from __future__ import annotations

import pytest

from rollout_svc.errors import NotNow
from tests.support.fake_vllm import FakeVLLM, Status
from tests.support.stage import stage

DISK = {"kind": "disk", "path": "/weights/1"}
LABEL = "/update_weight_version"
LOAD = "/collective_rpc"
START, FINISH = "/start_weight_update", "/finish_weight_update"
SEEN = (LABEL, LOAD, START, FINISH)


def posted(engine: FakeVLLM) -> list[str]:
    """What was done to its weights, in order."""
    return [path for method, path in engine.hits if method == "POST" and path in SEEN]


async def test_what_a_failed_load_began_is_forgotten() -> None:
    """At once, labelled as loading all the while, and whether or not the engine has a round to end."""  # P24
    async with FakeVLLM() as engine, stage(engine) as made:
        before = len(posted(engine))
        engine.fail_update = True
        engine.script(START, Status(500), times=None)  # one is open already, or it has none
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK, pause={})
        assert posted(engine)[before:] == [LABEL, LOAD, LABEL, START, FINISH]
        assert engine.weight_version == "loading 1"


async def test_a_load_that_goes_well_is_all_there_is() -> None:
    """No round is opened in an engine that has whole weights."""  # P24
    async with FakeVLLM() as engine, stage(engine) as made:
        before = len(posted(engine))
        await made.service.update_weights(1, DISK, pause={})
        assert posted(engine)[before:] == [LABEL, LOAD, LABEL]


async def test_an_engine_found_half_loaded_forgets_it_before_it_loads() -> None:
    """Whoever began it, and was not heard of again."""  # P24
    async with FakeVLLM(weight_version="loading 3") as engine, stage(engine) as made:
        await made.until(lambda: "restart it" in (made.worker().reason or ""), "it is kept out")
        before = len(posted(engine))
        await made.service.update_weights(4, DISK, pause={})
        assert posted(engine)[before:] == [LABEL, START, FINISH, LABEL, LOAD, LABEL]
        assert engine.weight_version == "4"


async def test_no_round_is_opened_in_an_engine_that_takes_no_label() -> None:
    """Without one nobody could tell that it has no weights."""  # P24
    async with FakeVLLM() as engine, stage(engine) as made:
        before = len(posted(engine))
        engine.script(LABEL, Status(500), times=None)
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK, pause={})
        assert set(posted(engine)[before:]) == {LABEL}


@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_what_is_frozen_in_half_loaded_weights_does_not_go_on_with_them(kv: str) -> None:
    """It is aborted before it is let go, keeps its tokens, and is continued where there are weights."""  # P24 P6
    async with FakeVLLM() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.advance(engine.live[0], 2)
        await made.pause(5.0, mode="keep", kv=kv)
        engine.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK)
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")
        await made.until(lambda: not made.worker().calls, "what it held is back")
        assert (engine.dead, len(engine.requests)) == (False, 1)
        engine.fail_update = False
        await made.service.update_weights(1, DISK, pause={})
        await engine.wait_running(1)
        engine.release(tokens=[3, 4])
        [record] = (await made.take(step=1))["groups"][0]["samples"]
        assert [(span["version"], span["start"], span["end"]) for span in record["weight_versions"]] == [
            (0, 0, 2),
            (1, 2, 4),
        ]
