"""New weights in a real vLLM while groups run: every token's logprob is that of the weights its span names."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from rollout_svc.pause.report import PauseReport
from tests.support.stage import Stage
from tests.vllm.models import TOLERANCE, Oracle
from tests.vllm.server import SLOTS, Server
from tests.vllm.site import WAIT_S, generated, prompt_ids, settled, spans, vllm_stage

LONG: Final = 1200
"""Tokens of an answer: seconds, where as many as there are slots run at once."""
TRIES: Final = 5
MEMBERS: Final = 4
GROUPS: Final = SLOTS // MEMBERS
RUNNING: Final[dict[str, Any]] = {"trainer": {"train_batch_size": GROUPS, "prompt_repeat_k": MEMBERS}}


def disk(oracle: Oracle, model: str) -> dict[str, Any]:
    """Where a model's weights are."""
    return {"kind": "disk", "path": str(oracle.path(model))}


async def halted(made: Stage, engine: Server, **pause: Any) -> PauseReport:
    """Have groups run, and pause while every member has some of its tokens and none has all; the report.

    A server without a core to itself can be seconds late with what it has: answers may be whole when the pause comes.
    """
    for attempt in range(TRIES):
        async with generated(engine, 4 * SLOTS):
            await made.push(GROUPS, attempt * GROUPS)
        report = await made.pause(**pause)
        assert report.clean
        calls = made.worker().calls
        members = [sample for group in made.live_groups() for sample in group.samples]
        if len(calls) == SLOTS or (not calls and all(0 < len(sample.response_ids) < LONG for sample in members)):
            return report
        await made.resume()
        await taken(made, 0)
    raise AssertionError(f"{TRIES} times some were whole before they could be stopped")


async def taken(made: Stage, step: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Take them, when they are whole: each member, after its prompt."""
    batch = await made.take(step, GROUPS, WAIT_S)
    await made.service.ack(batch["batch_id"])
    found = [(prompt_ids(int(g["prompt"]["id"][1:])), sample) for g in batch["groups"] for sample in g["samples"]]
    assert len(found) == SLOTS
    assert all(sample["finish_reason"] == "length" for _, sample in found)
    return found


def swap_of(sample: dict[str, Any]) -> int:
    """How many of its tokens are of version 0; the others are of version 1."""
    found = spans(sample)
    assert len(found) == 2, found
    [(_, _, swap), _] = found
    assert found == [(0, 0, swap), (1, swap, LONG)]
    assert 0 < swap < LONG
    return swap


def assert_made_by(
    oracle: Oracle,
    model: str,
    prompt: list[int],
    sample: dict[str, Any],
    tokens: tuple[int, int] = (0, LONG),
    *,
    cached: str | None = None,
) -> None:
    """These tokens are what the model says after all before them, and so are their logprobs."""
    first, last = tokens
    ids, before = sample["response_ids"][first:last], prompt + sample["response_ids"][:first]
    assert oracle.is_greedy(model, before, ids, cached=cached)
    wanted = oracle.logprobs(model, before, ids, cached=cached)
    assert sample["logprobs"][first:last] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.smoke
@pytest.mark.parametrize("kv", ["keep", "drop"])
async def test_groups_frozen_over_a_swap_go_on(engine: Server, oracle: Oracle, kv: str) -> None:
    """Nothing is aborted; what came before the swap is the old weights' work, what comes after it the new ones'.

    Without their cache the new weights read everything anew; with it, what the old ones had left of each token but the
    last, and a forward that is given just that says the same.
    """  # P7 P12 P25
    async with vllm_stage(engine, max_tokens=LONG, **RUNNING) as made:
        report = await halted(made, engine, mode="keep", kv=kv)
        assert (report.workers["w0"].cancelled, report.workers["w0"].answered) == (0, 0)
        await made.service.update_weights(1, disk(oracle, "b"))
        await made.resume(weight_version=1)
        found = await taken(made, 1)
        assert made.parts.ledger.as_json()["redone"] == 0
    for prompt, sample in found:
        swap = swap_of(sample)
        assert_made_by(oracle, "a", prompt, sample, (0, swap))
        assert_made_by(oracle, "b", prompt, sample, (swap, LONG), cached="a" if kv == "keep" else None)


@pytest.mark.smoke
async def test_groups_aborted_for_a_swap_are_continued_under_it(engine: Server, oracle: Oracle) -> None:
    """What they had is kept, and is the old weights'; the rest is what the new ones say after it."""  # P6 P7 P25
    async with vllm_stage(engine, max_tokens=LONG, **RUNNING) as made:
        await halted(made, engine)
        kept = sorted(len(sample.response_ids) for group in made.live_groups() for sample in group.samples)
        await settled(engine)
        await made.service.update_weights(1, disk(oracle, "b"))
        await made.resume(weight_version=1)
        found = await taken(made, 1)
    assert sorted(swap_of(sample) for _, sample in found) == kept
    for prompt, sample in found:
        swap = swap_of(sample)
        assert_made_by(oracle, "a", prompt, sample, (0, swap))
        assert_made_by(oracle, "b", prompt, sample, (swap, LONG))


async def test_groups_waited_for_are_the_old_weights_own(engine: Server, oracle: Oracle) -> None:
    """An update that waits finds them whole; the ones after it are the new weights'."""  # P7 P24
    async with vllm_stage(engine, max_tokens=LONG, **RUNNING) as made:
        async with generated(engine, 2 * SLOTS):
            await made.push(GROUPS)
        await made.service.update_weights(1, disk(oracle, "b"), pause={"mode": "wait"})
        before = await taken(made, 1)
        await made.push(GROUPS, GROUPS)
        after = await taken(made, 1)
    for version, model, found in ((0, "a", before), (1, "b", after)):
        for prompt, sample in found:
            assert spans(sample) == [(version, 0, LONG)]
            assert_made_by(oracle, model, prompt, sample)


@pytest.mark.parametrize(("mode", "version"), [("keep", None), ("abort", 1)])
async def test_a_trainers_own_round_is_adopted_under_load(
    engine: Server, oracle: Oracle, mode: str, version: int | None
) -> None:
    """`external`, by vLLM's own routes, bucket by bucket behind a pause; it labels them itself, or we do."""  # P7 P24
    pause = {"mode": "keep", "kv": "drop"} if mode == "keep" else {}
    async with vllm_stage(engine, max_tokens=LONG, **RUNNING) as made:
        await halted(made, engine, **pause)
        await asyncio.to_thread(engine.round, oracle.path("b"), 3, version)
        done = await made.service.update_weights(1, {"kind": "external"})
        assert done["workers"]["w0"] == {"ok": True, "version": 1}
        await made.resume(weight_version=1)
        found = await taken(made, 1)
    for prompt, sample in found:
        swap = swap_of(sample)
        assert_made_by(oracle, "a", prompt, sample, (0, swap))
        assert_made_by(oracle, "b", prompt, sample, (swap, LONG))
