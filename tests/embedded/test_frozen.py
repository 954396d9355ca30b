"""Pauses that keep what runs, over real sockets: freezing in place, retracting, and what may be done meanwhile."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.embedded.model import build, load_weights, save_weights
from tests.embedded.helpers import (
    ABORTED,
    ABORTED_QUEUED,
    CONFIG,
    PATIENCE_S,
    Served,
    job,
    plain_logprobs,
    served,
    small_model,
    uninterrupted_ids,
)

PAUSED = (200, {"message": "Generation paused successfully.", "status": "ok"})
FROZEN = ("in_place", "retract")


async def pause(engine: Served, mode: str) -> None:
    """Pause in a mode."""
    assert await engine.call("/pause_generation", {"mode": mode}) == PAUSED


async def resume(engine: Served) -> None:
    """Continue."""
    assert (await engine.call("/continue_generation", {}))[0] == 200


async def counts(engine: Served) -> tuple[int, int]:
    """The (running, waiting) that the engine reports."""
    load = (await engine.call("/v1/loads", method="GET"))[1]["loads"][0]
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def running(engine: Served, rid: str = "running", *, steps: int = 4, limit: int = 30) -> "asyncio.Task[Any]":
    """A request that has taken so many steps; it has one token more."""
    before = len(engine.scheduler.batch.jobs) + len(engine.scheduler.waiting)
    task = engine.generate(rid, limit=limit)
    await engine.queued(before + 1)
    await engine.step(steps)
    return task


def finish(answer: tuple[int, Any]) -> tuple[int, Any, int]:
    """Status, finish reason and number of tokens of an answer."""
    return answer[0], answer[1]["meta_info"]["finish_reason"], len(answer[1]["output_ids"])


@pytest.mark.parametrize(("mode", "loads", "flush"), [("in_place", (1, 1), 400), ("retract", (0, 2), 200)])
async def test_a_freeze_stops_all_and_loses_nothing(mode: str, loads: tuple[int, int], flush: int) -> None:
    """Nothing moves, newcomers wait at the door; after continue every token is that of the uninterrupted request."""
    whole = uninterrupted_ids(30)
    async with served() as engine:
        first = await running(engine)
        await pause(engine, mode)
        late = engine.generate("late", limit=3)
        await engine.until(lambda: engine.engine.door.waiting == 1)
        engine.scheduler.open()
        steps = engine.scheduler.steps
        assert await counts(engine) == loads
        assert (await engine.call("/flush_cache"))[0] == flush
        assert (await engine.call("/flush_cache?timeout=0.001"))[0] == flush
        assert (await engine.call("/ready", method="GET"))[0] == 503
        assert (await engine.call("/ping", method="GET"))[0] == 200
        assert (engine.scheduler.steps, first.done(), late.done()) == (steps, False, False)
        await resume(engine)
        status, body = await first
        assert (status, body["output_ids"]) == (200, whole)
        assert body["meta_info"]["num_retractions"] == (mode == "retract")
        assert body["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 30}]
        done = job("first")
        done.ids = body["output_ids"]
        logprobs = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(plain_logprobs(small_model(), done), abs=1e-4)
        assert (await late)[1]["output_ids"] == whole[:3]
        assert (await engine.call("/ready", method="GET"))[0] == 200
        engine.assert_idle()


async def test_a_freeze_keeps_the_queue_in_order() -> None:
    """What was retracted goes on before what had not started."""
    async with served(max_running=2) as engine:
        tasks = [engine.generate(f"r{index}", limit=6) for index in range(4)]
        await engine.queued(4)
        await engine.step(2)
        await pause(engine, "retract")
        assert await counts(engine) == (0, 4)
        await resume(engine)
        await engine.step()
        assert [one.rid for one in engine.scheduler.batch.jobs] == ["r0", "r1"]
        engine.scheduler.open()
        for task in tasks:
            assert finish(await task) == (200, {"type": "length", "length": 6}, 6)
        engine.assert_idle()


async def test_an_abort_in_place_takes_effect_on_continue() -> None:
    """Frozen in a row, an aborted request ends with its tokens once the freeze does; in the queue, it ends at once."""
    async with served(max_running=2) as engine:
        one, other = await running(engine, "one"), await running(engine, "other", steps=2)
        queued = engine.generate("queued")
        await engine.queued(3)
        await pause(engine, "in_place")
        for rid in ("one", "queued"):
            assert await engine.call("/abort_request", {"rid": rid}) == (200, "")
        assert finish(await queued) == (200, ABORTED_QUEUED, 0)
        assert (one.done(), await counts(engine)) == (False, (2, 0))
        await resume(engine)
        assert finish(await one) == (200, ABORTED, 7)
        engine.scheduler.open()
        assert finish(await other) == (200, {"type": "length", "length": 30}, 30)
        engine.assert_idle()


async def test_an_abort_of_a_retracted_request_is_immediate() -> None:
    """It sits in the queue, and is answered from there with the tokens it had."""
    whole = uninterrupted_ids(30)
    async with served() as engine:
        first, second = await running(engine, "first"), await running(engine, "second", steps=1)
        await pause(engine, "retract")
        await engine.call("/abort_request", {"rid": "first"})
        answer = await first
        assert finish(answer) == (200, ABORTED_QUEUED, 6)
        assert answer[1]["output_ids"] == whole[:6]
        assert answer[1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
        assert "prompt_tokens" not in answer[1]["meta_info"]
        await engine.call("/abort_request", {"abort_all": True})
        assert finish(await second) == (200, ABORTED_QUEUED, 2)
        await resume(engine)
        engine.assert_idle()


async def test_an_abort_is_lost_at_the_door() -> None:
    """As in SGLang, it does nothing to a blocked request, nor does a later one by id: only `abort_all`, once inside."""
    async with served() as engine:
        await pause(engine, "in_place")
        tasks = {rid: engine.generate(rid) for rid in ("late-1", "late-10")}
        await engine.until(lambda: engine.engine.door.waiting == 2)
        await engine.call("/abort_request", {"rid": "late-1"})
        await engine.call("/abort_request", {"abort_all": True})
        await pause(engine, "abort")
        assert engine.engine.door.waiting == 2
        await resume(engine)
        await engine.queued(2)
        await engine.step()
        await engine.call("/abort_request", {"rid": "late-1"})
        await engine.queued(2)
        await engine.call("/abort_request", {"rid": "late-10"})
        assert finish(await tasks["late-10"]) == (200, ABORTED, 2)
        assert not tasks["late-1"].done()
        await engine.call("/abort_request", {"abort_all": True})
        assert finish(await tasks["late-1"]) == (200, ABORTED, 2)
        again = engine.generate("late-1")
        await engine.queued(1)
        await engine.call("/abort_request", {"rid": "late-1"})
        assert finish(await again) == (200, ABORTED_QUEUED, 0)
        engine.assert_idle()


@pytest.mark.parametrize("first", ["abort", *FROZEN])
@pytest.mark.parametrize("second", ["abort", *FROZEN])
async def test_of_two_pauses_the_later_one_holds(first: str, second: str) -> None:
    """`abort` ends what was frozen, `retract` frees the rows, `in_place` changes nothing; one continue ends both."""
    whole = uninterrupted_ids(30)
    async with served() as engine:
        task = await running(engine)
        await pause(engine, first)
        await pause(engine, second)
        ended = "abort" in {first, second}
        rows = 0 if ended or "retract" in {first, second} else 1
        assert await counts(engine) == (rows, 0 if ended else 1 - rows)
        late = engine.generate("late", limit=3)
        await engine.until(lambda: engine.engine.door.waiting == 1)
        engine.scheduler.open()
        if ended:
            kind = ABORTED_QUEUED if (first, second) == ("retract", "abort") else ABORTED
            assert finish(await task) == (200, kind, 5)
        await resume(engine)
        await resume(engine)
        assert (await task)[1]["output_ids"] == (whole[:5] if ended else whole)
        assert (await late)[1]["output_ids"] == whole[:3]
        assert (await engine.call("/ready", method="GET"))[0] == 200
        engine.assert_idle()


async def test_an_abort_that_waits_for_continue_comes_true_when_the_rows_are_freed() -> None:
    """In place, then retracted: what was aborted meanwhile ends at that moment."""
    async with served() as engine:
        task, other = await running(engine), await running(engine, "other", steps=1)
        await pause(engine, "in_place")
        await engine.call("/abort_request", {"rid": "running"})
        await pause(engine, "retract")
        assert finish(await task) == (200, ABORTED_QUEUED, 6)
        engine.scheduler.open()
        await resume(engine)
        assert finish(await other) == (200, {"type": "length", "length": 30}, 30)
        engine.assert_idle()


@pytest.mark.parametrize("mode", FROZEN)
async def test_a_continue_without_a_pause_changes_nothing(mode: str) -> None:
    """Neither before a pause, nor after it was ended."""
    async with served() as engine:
        await resume(engine)
        task = await running(engine)
        await pause(engine, mode)
        await resume(engine)
        await resume(engine)
        engine.scheduler.open()
        assert (await task)[1]["output_ids"] == uninterrupted_ids(30)
        engine.assert_idle()


@pytest.mark.parametrize("mode", FROZEN)
async def test_weights_change_at_once_under_what_is_frozen(mode: str, tmp_path: Path) -> None:
    """Frozen requests go on under the new weights, and their spans say where. # P7.

    Retracted ones are computed anew: no key or value of the old weights is read. # P25. In place they are kept.
    """
    save_weights(build(CONFIG, 99), tmp_path)
    async with served() as engine:
        task = await running(engine)
        await pause(engine, mode)
        body = {"model_path": str(tmp_path), "weight_version": "1", "flush_cache": False}
        assert (await engine.call("/update_weights_from_disk", body))[0] == 200
        assert (await engine.call("/model_info", method="GET"))[1]["weight_version"] == "1"
        late = engine.generate("late", limit=2)
        await engine.until(lambda: engine.engine.door.waiting == 1)
        engine.scheduler.open()
        await resume(engine)
        status, answer = await task
        assert (status, answer["output_ids"][:5]) == (200, uninterrupted_ids(5))
        spans = [{"version": "default", "start": 0, "end": 5}, {"version": "1", "start": 5, "end": 30}]
        assert (answer["meta_info"]["weight_versions"], answer["meta_info"]["weight_version"]) == (spans, "1")
        assert (await late)[1]["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 2}]
        model, done = small_model(), job("done")
        done.ids = answer["output_ids"]
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs[:5] == pytest.approx(plain_logprobs(model, done)[:5], abs=1e-4)
        load_weights(model, tmp_path)
        fresh = plain_logprobs(model, done)[5:] == pytest.approx(logprobs[5:], abs=1e-4)
        assert fresh == (mode == "retract")
        engine.assert_idle()


@pytest.mark.parametrize("mode", FROZEN)
async def test_a_label_changes_at_once_under_what_is_frozen(mode: str) -> None:
    """Spared requests have a span for each label; told to, it aborts them as an abort does. # P7."""
    async with served() as engine:
        task = await running(engine)
        await pause(engine, mode)
        label: dict[str, Any] = {"new_version": "1", "abort_all_requests": False}
        assert (await engine.call("/update_weight_version", label))[0] == 200
        await resume(engine)
        await engine.step(2)
        await pause(engine, mode)
        assert (await engine.call("/update_weight_version", {"new_version": "2"}))[0] == 200
        assert await counts(engine) == ((1, 0) if mode == "in_place" else (0, 0))
        await resume(engine)
        meta = (await task)[1]["meta_info"]
        assert meta["finish_reason"] == (ABORTED if mode == "in_place" else ABORTED_QUEUED)
        assert [span["version"] for span in meta["weight_versions"]] == ["default", "1"]
        engine.assert_idle()


async def test_an_update_that_waits_goes_ahead_when_the_engine_is_frozen(tmp_path: Path) -> None:
    """A change of weights begun before the pause does not wait for requests that stand still."""
    save_weights(build(CONFIG, 99), tmp_path)
    async with served() as engine:
        task = await running(engine)
        body = {"model_path": str(tmp_path), "weight_version": "1"}
        update = asyncio.create_task(engine.call("/update_weights_from_disk", body), name="update")
        await engine.until(lambda: engine.engine.door.closed)
        assert not update.done()
        await pause(engine, "in_place")
        assert (await update)[0] == 200
        engine.scheduler.open()
        await resume(engine)
        assert [span["version"] for span in (await task)[1]["meta_info"]["weight_versions"]] == ["default", "1"]
        engine.assert_idle()


@pytest.mark.parametrize("mode", FROZEN)
async def test_a_client_that_leaves_a_frozen_engine_is_dropped_at_once(mode: str) -> None:
    """Its row or its place in the queue is free before the engine goes on."""
    async with served() as engine:
        task = await running(engine)
        await pause(engine, mode)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        await engine.queued(0)
        assert await counts(engine) == (0, 0)
        assert (await engine.call("/flush_cache"))[0] == 200
        await resume(engine)
        engine.assert_idle()


@pytest.mark.parametrize("mode", FROZEN)
async def test_closing_a_frozen_engine_answers_what_it_holds(mode: str) -> None:
    """A shutdown gives frozen requests their partial output, and turns away those at the door."""
    async with served() as engine:
        task = await running(engine)
        await pause(engine, mode)
        late = engine.generate("late")
        await engine.until(lambda: engine.engine.door.waiting == 1)
        await engine.server.close()
        assert finish(await task)[2] == 5
        assert finish(await late) == (200, ABORTED_QUEUED, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_after_any_history_a_continue_ends_every_request(seed: int, tmp_path: Path) -> None:
    """Pauses, continues, aborts, updates and leavers in any order: all answers are whole or aborted, nothing is left.

    Spans cover each answer, in the order in which the labels came. # P7
    """
    save_weights(small_model(), tmp_path)
    whole = uninterrupted_ids(40)
    rng = random.Random(seed)
    async with served(max_running=3, is_open=True) as engine:
        tasks: list[asyncio.Task[Any]] = []
        left: list[asyncio.Task[Any]] = []
        for turn in range(60):
            match rng.choice(["generate", "generate", "pause", "resume", "abort", "update", "leave"]):
                case "generate":
                    tasks.append(engine.generate(f"r{turn:02}", limit=40))
                case "pause":
                    await pause(engine, rng.choice(["abort", *FROZEN]))
                case "resume":
                    await resume(engine)
                case "abort":
                    await engine.call("/abort_request", {"rid": f"r{rng.randrange(turn + 1):02}"})
                case "update":
                    body = {"model_path": str(tmp_path), "weight_version": str(turn)}
                    assert (await engine.call("/update_weights_from_disk", body))[0] == 200
                case _ if tasks:
                    left.append(tasks.pop(rng.randrange(len(tasks))))
                    left[-1].cancel()
        await resume(engine)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*left, return_exceptions=True)
            for status, answer in await asyncio.gather(*tasks):
                ids, meta = answer["output_ids"], answer["meta_info"]
                assert (status, ids) == (200, whole[: len(ids)])
                assert meta["finish_reason"] in ({"type": "length", "length": 40}, ABORTED, ABORTED_QUEUED)
                assert sum(span["end"] - span["start"] for span in meta["weight_versions"]) == len(ids)
                labels = [
                    -1 if span["version"] == "default" else int(span["version"]) for span in meta["weight_versions"]
                ]
                assert labels == sorted(set(labels))
        await engine.until(lambda: engine.engine.door.inside == 0)
        await engine.queued(0)
        engine.assert_idle()


async def test_the_modes_are_told() -> None:
    """`/server_info` lists them, and a mode it does not know is refused with their names."""
    async with served() as engine:
        info = (await engine.call("/server_info", method="GET"))[1]
        assert info["pause_modes"] == ["abort", "retract", "in_place"]
        status, answer = await engine.call("/pause_generation", {"mode": "keep"})
        assert status == 400
        assert answer["message"].endswith("body.mode: must be one of 'abort', 'retract', 'in_place'; got 'keep'")
        assert (await engine.call("/ready", method="GET"))[0] == 200
