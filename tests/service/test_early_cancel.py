"""Early cancel: what no step can take any more is ended before it is finished; the oldest go first."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.buffer.storage import MemoryStorage, Position
from rollout_svc.errors import BadRequest, NotNow
from rollout_svc.events import GroupAdmitted, GroupSettled
from rollout_svc.group import Group
from tests.support.answers import ids
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import PROMPT, Stage, stage
from tests.support.virtual import soon

DISK = {"kind": "disk", "path": "/w"}
SMALL: dict[str, Any] = {"train_batch_size": 2, "max_staleness": 1}
ON: dict[str, Any] = {"producer": {"strategy": "sync"}}
"""The one strategy under which partials are gone on with at staleness 0."""


class Noting(MemoryStorage):
    """Remembers what it was told of admissions and settlements."""

    def __init__(self) -> None:
        self.again: list[bool] = []
        self.positions: list[int | None] = []

    def admitted(self, group: Group, position: Position | None) -> None:
        """Remember where the source stands."""
        self.positions.append(None if position is None else position.used)

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Remember whether its prompt waits to be admitted once more."""
        self.again.append(again)


def hold(*numbers: int) -> Any:
    """A rule: these prompts' requests are held, all others are answered at once."""

    def answer(call: Call) -> Reply | None:
        number = call.prompt_ids[len(PROMPT)]
        return None if number in numbers else Reply(tokens=[number])

    return answer


async def cut(made: Stage, engine: FakeSGLang) -> None:
    """Cut what runs, with three tokens of the weights there are, and go on."""
    await made.pause()
    await made.resume()
    await engine.wait_running(1)


async def test_a_running_group_that_is_too_old_for_the_next_step_is_ended() -> None:
    """Its tokens are two steps old once the batch of step 1 is lent: EXPIRED, and its engine is told."""  # P32
    async with FakeSGLang(weight_version="0") as engine, stage(engine, trainer=SMALL) as made:
        engine.answer = hold(0)
        await made.push(5)
        await engine.wait_running(1)
        await cut(made, engine)
        await made.until(lambda: made.groups("ready") >= 2)
        await made.take(step=0, groups=2)
        assert (engine.running, made.groups("expired")) == (1, 0)  # at step 1 it would be one behind
        await made.until(lambda: made.groups("ready") >= 1)
        await made.take(step=1, groups=1)
        await made.until(lambda: made.groups("expired") == 1)
        assert [(event.outcome, event.reason) for event in made.of(GroupSettled)] == [("expired", "stale")]
        await engine.until(lambda: engine.running == 0, "the engine is told, or hung up on")
        assert made.parts.tally.settled["expired:stale"] == 1


async def test_an_unfinished_group_expires_when_the_update_lands() -> None:
    """In the buffer, cut by the pause: as soon as the weights leave it behind, not at the next hand-over."""  # P32
    trainer = SMALL | {"max_staleness": 0}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, trainer=trainer, **ON) as made:
        await engine.wait_running(1)
        await made.pause()
        assert made.groups("aborted") == 1
        await made.service.update_weights(1, DISK)
        await made.until(lambda: made.groups("expired") == 1)
        await made.resume()
        assert len(engine.requests) == 1


async def test_a_group_whose_cut_sample_begins_again_is_not_too_old() -> None:
    """With partial rollout off its tokens go with the next attempt, so no weights leave it behind."""  # P32
    trainer = SMALL | {"max_staleness": 0}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, trainer=trainer) as made:
        assert "partial_rollout: false" in made.service.concurrency()["warnings"][0]
        await engine.wait_running(1)
        await made.service.update_weights(1, DISK, pause={})
        await engine.wait_requests(2)
        assert engine.requests[1].prompt_ids == [*PROMPT, 0]
        engine.release(tokens=1)
        [group] = (await made.take(step=1))["groups"]
        assert [span["version"] for span in group["samples"][0]["weight_versions"]] == [1]
        assert (made.parts.tally.redone, made.groups("expired")) == (1, 0)


async def test_tokens_of_an_unknown_version_end_their_group() -> None:
    """Nobody vouches for them, so nothing more is generated after them."""  # P7 P32
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, trainer=SMALL) as made:
        await engine.wait_running(1)
        spans = [{"version": "x", "start": 0, "end": 1}, {"version": "0", "start": 1, "end": 2}]
        engine.release(fate=Reply(tokens=2, finish="abort", weight_versions=spans))
        await made.until(lambda: made.groups("expired") == 1)
        assert [event.reason for event in made.of(GroupSettled)] == ["version_unknown"]
        assert len(engine.requests) == 1


async def test_between_two_takes_nothing_is_begun_that_the_next_step_cannot_use() -> None:
    """Lent and acknowledged, a step is past: at staleness 0 the next prompts wait for its update."""  # P32
    trainer = SMALL | {"max_staleness": 0}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, trainer=trainer) as made:
        engine.answer = hold()
        await made.push(6)
        batch = await made.take(step=0, groups=2)
        await made.service.ack(batch["batch_id"])
        await soon(50)
        assert made.parts.producer.waiting == "step_ahead"
        assert made.groups("admitted") == 2
        await made.service.update_weights(1, DISK, pause={})
        assert len((await made.take(step=1, groups=2))["groups"]) == 2


async def test_the_oldest_go_first() -> None:
    """Of what is ready the groups with the oldest tokens are lent first, whatever became ready before them."""  # P32
    trainer = SMALL | {"max_staleness": 3}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, trainer=trainer) as made:
        engine.answer = hold(0)
        await made.push(1)
        await engine.wait_running(1)
        await made.service.update_weights(1, DISK, pause={})
        await made.push(2, first=1)
        await made.until(lambda: made.groups("ready") == 2)
        engine.release(tokens=1)
        await made.until(lambda: made.groups("ready") == 3)
        assert ids(await made.take(step=1, groups=3)) == ["p0", "p1", "p2"]


async def test_a_prompt_that_expired_is_admitted_once_more() -> None:
    """With a tail its group is settled, counted and noted as such, and the prompt goes first in a round."""  # P1
    storage = Noting()
    producer = {"strategy": "disaggregated", "tail_batch_size": 1}
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, trainer=SMALL, producer=producer, storage=storage) as made,
    ):
        engine.answer = hold(0)
        await made.push(1)
        await engine.wait_running(1)
        await made.pause()
        with pytest.raises(NotNow):
            await made.take(step=2, timeout_s=0.05)  # two steps ahead of its tokens
        await made.until(lambda: made.groups("expired") == 1)
        assert storage.again == [True]
        engine.answer = hold()
        await made.service.update_weights(1, DISK)
        await made.resume()
        assert ids(await made.take(step=1)) == ["p0"]
        assert len({event.group_id for event in made.of(GroupAdmitted)}) == 2
        assert storage.positions == [1, None]


async def test_tokens_of_weights_that_are_gone_are_never_handed_over() -> None:
    """A trainer goes back to earlier weights: what later ones made is ended, ready or not."""  # P32
    trainer = SMALL | {"max_staleness": 8, "initial_version": 3}
    async with FakeSGLang(weight_version="3") as engine, stage(engine, trainer=trainer) as made:
        engine.answer = hold(2)
        await made.push(3)
        await engine.wait_running(1)
        await made.until(lambda: made.groups("ready") == 2)
        await cut(made, engine)
        await made.service.update_weights(4, DISK, pause={})
        assert made.groups("expired") == 0
        await made.service.update_weights(2, DISK, pause={}, force=True)
        assert made.parts.tally.settled["expired:weights_gone"] == 3
        await made.push(2, first=10)
        batch = await made.take(step=2, groups=2)
        assert batch["metrics"]["staleness"] == {"0": 2}
        with pytest.raises(BadRequest):
            await made.service.update_weights(-1, DISK, pause={})
