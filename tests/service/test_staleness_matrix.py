"""Every setting of interval, bound, partial rollout and tail under every strategy: a short run with real pauses.

Every fourth prompt is long: its requests are held, and cut with two tokens by the pause of an update, until a take has
nothing else to wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from rollout_svc.assembly import prepare
from rollout_svc.config import Strategy
from rollout_svc.errors import ConfigError
from rollout_svc.events import GroupHandedBack, GroupSettled
from tests.support.bell import WAIT_S
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import PROMPT, Stage, make_config, stage
from tests.support.virtual import soon

BATCH, STEPS, PUSHED = 3, 5, 60
STRATEGIES: tuple[Strategy, ...] = ("sync", "async", "disaggregated")
IMPOSSIBLE = "http://127.0.0.1:9"

Cell = tuple[Strategy, int, int, bool, bool]


def number_of(call: Call) -> int:
    """Which prompt it is, whatever tokens came after it."""
    return call.prompt_ids[len(PROMPT)]


def is_long(call: Call) -> bool:
    """Whether the test decides when it ends."""
    return number_of(call) % 4 == 0


def sections(strategy: Strategy, interval: int, bound: int, *, partial: bool | None, tail: bool) -> dict[str, Any]:
    """The configuration of a cell."""
    judger = {"path": "tests.support.judges:Judge"}
    task = {"name": "t", "prompts": {"push": True}, "judger": judger, "sampling": {"max_tokens": 64}}
    tailing = {"tail_batch_size": 2, "tail_after_aborts": 1} if tail else {}
    return {
        "tasks": [task | {"partial_rollout": partial}],
        "trainer": {
            "train_batch_size": BATCH,
            "over_sample_threshold": 0.5,
            "max_staleness": bound,
            "update_interval": interval,
        },
        "producer": {"strategy": strategy} | tailing,
    }


def cells() -> Iterator[Cell]:
    """All that can work."""
    on_or_off = (True, False)
    for strategy, interval, bound, partial, tail in product(STRATEGIES, (1, 2), (0, 1, 2), on_or_off, on_or_off):
        if bound >= interval - 1 and not (partial and bound == 0 and strategy != "sync"):
            yield strategy, interval, bound, partial, tail


def calm(made: Stage, engine: FakeSGLang) -> bool:
    """Whether all that is under way are requests that the engine holds, and nothing more is started."""
    waiting = made.parts.producer.waiting
    return waiting not in ("", "gate_closed") and made.samples("in_flight") == engine.running


async def settle(made: Stage, engine: FakeSGLang) -> None:
    """Let the producer see what has changed, and wait until it has nothing more to do."""
    await soon(20)
    await made.until(lambda: calm(made, engine))


def stuck(made: Stage, engine: FakeSGLang) -> bool:
    """Whether only a long request can change anything."""
    return engine.running > 0 and calm(made, engine)


async def taken(made: Stage, engine: FakeSGLang, step: int) -> dict[str, Any]:
    """Take the batch of a step; a long request ends when the take has nothing else to wait for."""
    take = made.start(made.service.take_batch(step, BATCH, WAIT_S))
    while not take.done():
        await made.until(lambda: take.done() or stuck(made, engine), f"the batch of step {step}")
        if not take.done() and stuck(made, engine):
            engine.release(engine.calls("running")[0], tokens=1)
        await soon()
    batch: dict[str, Any] = await take
    made.audit()
    return batch


async def updated(made: Stage, engine: FakeSGLang, version: int) -> None:
    """Bring weights, once all that is cut are long requests."""
    await settle(made, engine)
    await made.service.update_weights(version, {"kind": "disk", "path": "/w"}, pause={"deadline_s": 2.0})
    await settle(made, engine)


def check_ages(batch: dict[str, Any], bound: int) -> None:
    """No token is older than the bound, nor of a version nobody knows."""
    for group in batch["groups"]:
        for sample in group["samples"]:
            assert sample["weight_versions"]
            for span in sample["weight_versions"]:
                assert batch["step"] - span["version"] <= bound


@pytest.mark.parametrize(("strategy", "interval", "bound", "partial", "tail"), list(cells()))
async def test_every_cut_prompt_is_continued_redone_or_counted(
    strategy: Strategy, interval: int, bound: int, partial: bool, tail: bool
) -> None:
    """No batch is older than the bound, no prompt is lost, and what was cut went the way the settings say."""  # P1 P32
    config = sections(strategy, interval, bound, partial=partial, tail=tail)
    async with FakeSGLang(weight_version="0", report_spans=True) as engine:
        engine.tokens_so_far = 2
        engine.answer = lambda call: None if is_long(call) else Reply(tokens=[number_of(call)])
        async with stage(engine, pushed=PUSHED, **config) as made:
            consumed: list[str] = []
            for step in range(STEPS):
                batch = await taken(made, engine, step)
                check_ages(batch, bound)
                consumed += [group["prompt"]["id"] for group in batch["groups"]]
                await made.service.ack(batch["batch_id"])
                if (step + 1) % interval == 0:
                    await updated(made, engine, step + 1)
            await settle(made, engine)
            await made.pause()
            check_prompts(made, consumed, tail=tail)
            check_ways(made, engine, partial=partial)


def check_prompts(made: Stage, consumed: list[str], *, tail: bool) -> None:
    """Consumed, under way, in the tail, still in the source, or expired for good: each prompt once."""
    here = [group.prompt.prompt_id for group in made.live_groups()]
    here += [prompt.prompt_id for prompt in made.parts.producer.tail.prompts()]
    here += [line.prompt_id for line in made.source._lines]
    expired = sum(event.outcome == "expired" for event in made.of(GroupSettled))
    counts = Counter([*consumed, *here])
    assert set(counts.values()) == {1}
    assert len(counts) == PUSHED - (0 if tail else expired)
    assert {event.reason for event in made.of(GroupSettled)} <= {"stale"}
    assert made.groups("expired") == expired


def check_ways(made: Stage, engine: FakeSGLang, *, partial: bool) -> None:
    """Cut samples went on from their tokens, or from the prompt, and the rest expired or waits."""
    tally = made.parts.tally
    went_on = [call for call in engine.requests if len(call.prompt_ids) > len(PROMPT) + 1]
    if partial:
        assert tally.redone == 0
        assert len(went_on) == tally.continued
    else:
        assert (tally.continued, went_on) == (0, [])
    settled = {event.group_id for event in made.of(GroupSettled)}
    cut = Counter(event.group_id for event in made.of(GroupHandedBack))
    waiting = {group.group_id for group in made.live_groups() if group.account == "aborted"}
    left = sum(group_id in settled or group_id in waiting for group_id in cut)
    assert tally.aborted == sum(cut.values())
    assert 0 <= tally.aborted - tally.continued - tally.redone <= left


@pytest.mark.parametrize(
    ("strategy", "interval", "bound", "partial", "path"),
    [
        ("async", 2, 0, None, "trainer.max_staleness"),
        ("disaggregated", 3, 1, False, "trainer.max_staleness"),
        ("sync", 2, 0, True, "trainer.max_staleness"),
        ("async", 1, 0, True, "tasks.0.partial_rollout"),
        ("disaggregated", 1, 0, True, "tasks.0.partial_rollout"),
    ],
)
def test_what_can_never_work_is_refused_with_the_arithmetic(
    strategy: Strategy, interval: int, bound: int, partial: bool | None, path: str
) -> None:
    """A step before an update that nothing can serve, or a partial that always expires: refused at its path."""  # P32
    config = make_config(IMPOSSIBLE, **sections(strategy, interval, bound, partial=partial, tail=False))
    with pytest.raises(ConfigError) as refused:
        prepare(config)
    [problem] = refused.value.problems
    assert problem.path == path
    assert "behind" in problem.message
    assert str(bound) in problem.message
