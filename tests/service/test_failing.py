"""What engines, agents and judgers can do wrong: each ends as a typed outcome of its sample, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import GroupSettled, ProducerWaiting, SampleFailed
from rollout_svc.judging import Reward
from rollout_svc.producer.caution import LIMIT
from tests.support.fake_sglang import Call, FakeSGLang, Raw, Reply, Status
from tests.support.faults import RUBBISH, Fault
from tests.support.judges import GroupJudge, Judge
from tests.support.stage import Stage, stage

POISON = 99
"""Number of the prompt that meets the fault; every other prompt is answered well."""
HARMLESS = {"completion_tokens wrong"}
"""Wrong, but in a figure nobody here reads: ids and logprobs are whole."""
REFUSED = (400, 402, 405, 409, 413, 418, 422, 431)
"""Statuses that speak of the request: the sample's own failure."""
STRANGE = (201, 204, 301, 302, 304)
"""Statuses that are neither success nor refusal."""


def poisoned(fault: Fault) -> Callable[[Call], Reply | Fault]:
    """Make the rule that gives the poison prompt the fault."""

    def answer(call: Call) -> Reply | Fault:
        return fault if call.prompt_ids[-1] == POISON else Reply(tokens=2)

    return answer


async def test_a_judge_that_always_fails_does_not_use_up_the_data(tmp_path: Path) -> None:
    """After a few failed groups the position of the data set hardly moves, and a take says why."""  # P18
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n')
    async with FakeSGLang(weight_version="0") as engine, stage(engine, prompts={"jsonl": str(path)}) as made:
        engine.answer = lambda _: Reply(tokens=2)
        made.judge.verdict = lambda _: ValueError("no ground truth")
        await made.until(lambda: made.parts.producer.waiting == "every_group_fails")
        with pytest.raises(NotNow, match="every_group_fails"):
            await made.take(timeout_s=0.05)
        assert LIMIT <= made.groups("admitted") <= LIMIT + 4
        [said] = [waits for waits in made.of(ProducerWaiting) if waits.reason == "every_group_fails"]
        assert said.detail == "judge_error"
        made.judge.verdict = lambda _: 1.0
        assert (await made.take())["groups"]


async def settles(made: Stage, reason: str) -> None:
    """Wait until the poison prompt's group failed for good, and check that all else went well."""
    await made.until(lambda: made.groups("failed") == 1 and made.groups("ready") == 2)
    assert [(settled.outcome, settled.reason) for settled in made.of(GroupSettled)] == [("failed", reason)]
    assert [failed.final for failed in made.of(SampleFailed)] == [False, False, True]
    batch = await made.take(groups=2)
    assert {group["prompt"]["id"] for group in batch["groups"]} == {"p0", "p1"}
    assert batch["metrics"]["failed"] == {reason: 3}
    assert batch["metrics"]["settled"] == {f"failed:{reason}": 1}
    assert made.service.state == "running"


@pytest.mark.parametrize("name", sorted(set(RUBBISH) - HARMLESS))
async def test_a_body_that_is_no_answer_fails_its_sample(name: str) -> None:
    """Every 200 that is no answer is `invalid_response`, three times, then FAILED for good; others go on."""  # P2 P4
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = poisoned(RUBBISH[name])
        async with stage(engine, pushed=2) as made:
            await made.push(1, first=POISON)
            await settles(made, "invalid_response")


@pytest.mark.parametrize("code", REFUSED)
async def test_a_refusal_fails_its_sample(code: int) -> None:
    """Any other 4xx is `rejected_by_engine`: counted, final at the third, no worker blamed."""  # P4
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = poisoned(Status(code))
        async with stage(engine, pushed=2) as made:
            await made.push(1, first=POISON)
            await settles(made, "rejected_by_engine")
            assert made.worker().breaker.opened == 0


@pytest.mark.parametrize("code", STRANGE)
async def test_a_strange_status_fails_its_sample(code: int) -> None:
    """A status that is no answer and no refusal is an invalid response; redirects are not followed."""  # P4
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = poisoned(Status(code, b"", {"Location": engine.url + "/v1/models"}))
        async with stage(engine, pushed=2) as made:
            await made.push(1, first=POISON)
            await settles(made, "invalid_response")


async def test_more_tokens_than_were_asked_for_are_no_answer() -> None:
    """An answer longer than `max_tokens` is invalid: nothing is cut to fit."""  # P6
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: Reply(tokens=17 if call.prompt_ids[-1] == POISON else 16)
        async with stage(engine, pushed=2) as made:
            await made.push(1, first=POISON)
            await settles(made, "invalid_response")


async def test_a_prompt_beyond_the_context_is_a_typed_failure() -> None:
    """What the engine refuses as too long fails alone."""  # P4
    async with FakeSGLang(weight_version="0", context=6) as engine:
        engine.answer = lambda _: Reply(tokens=1)
        async with stage(engine, pushed=1) as made:
            await made.push([{"id": "long", "input_ids": list(range(7))}])
            await made.until(lambda: made.groups("failed") == 1 and made.groups("ready") == 1)
            assert [settled.reason for settled in made.of(GroupSettled)] == ["rejected_by_engine"]


async def test_siblings_survive_a_failure() -> None:
    """A member that fails and is redone costs its siblings nothing: they are generated and judged once."""  # P5
    trainer = {"prompt_repeat_k": 3, "train_batch_size": 1}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, trainer=trainer) as made:
        await engine.wait_running(3)
        engine.release(engine.requests[0], tokens=[1])
        engine.release(engine.requests[1], tokens=[2])
        await made.until(lambda: made.samples("ready") == 2)
        engine.release(engine.requests[2], fate=Raw(b"{}"))
        await engine.wait_requests(4)
        assert made.samples("ready") == 2
        engine.release(tokens=[3])
        batch = await made.take()
        [group] = batch["groups"]
        assert [sample["response_ids"] for sample in group["samples"]] == [[1], [2], [3]]
        assert (len(engine.requests), len(made.judge.seen)) == (4, 3)
        assert (batch["metrics"]["redone"], made.service.status()["ledger"]["redone"]) == (1, 1)


async def test_a_failed_member_takes_its_group_along() -> None:
    """At `max_attempts` the whole group is FAILED, done siblings too, and nothing of it is handed over."""  # P1 P2
    trainer = {"prompt_repeat_k": 3, "train_batch_size": 1}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, trainer=trainer) as made:
        await engine.wait_running(3)
        engine.release(engine.requests[0], tokens=[1])
        await made.until(lambda: made.samples("ready") == 1)
        for turn in range(3):
            await engine.wait_requests(3 + turn)
            engine.release(engine.requests[2 + turn], fate=Raw(b"{}"))
        await made.until(lambda: made.groups("failed") == 1)
        assert made.samples("failed") == 3
        await engine.wait_aborts(1)  # the member that still ran is not left to the engine
        assert engine.aborts == [{"rid": engine.requests[1].rid, "abort_all": False}]
        await engine.wait_idle()


async def test_a_broken_agent_is_a_typed_failure() -> None:
    """An agent loop that raises, or returns without a turn, fails its sample as `agent_error`."""  # P4
    agent = {"path": "tests.support.loops:Broken"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=agent) as made:
        await made.until(lambda: made.groups("failed") == 1)
        assert [failed.reason for failed in made.of(SampleFailed)] == ["agent_error"] * 3
        assert "the loop is broken" in made.of(SampleFailed)[0].message
        assert not engine.requests


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (ValueError("no idea"), "judge_error"),
        (None, "judge_invalid"),
        ("1.0", "judge_invalid"),
        (float("nan"), "judge_invalid"),
        (float("inf"), "judge_invalid"),
        ([1.0], "judge_invalid"),
        (Reward(float("nan")), "judge_invalid"),
    ],
)
async def test_a_verdict_that_is_none_is_never_a_zero(verdict: object, reason: str) -> None:
    """A judge that fails is asked again, then its sample is FAILED with its reason; no reward is made up."""  # P2 P21
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine) as made:
            judge: Judge = made.judge
            judge.verdict = lambda sample: verdict if sample.ground_truth == POISON else 0.5
            await made.push(2)
            await made.push(1, first=POISON)
            await settles(made, reason)
            assert len(engine.requests) == 3  # judged again, not generated again


async def test_a_judge_that_recovers_gives_the_reward() -> None:
    """Two failures and then a verdict: the sample is COMPLETED with it."""  # P21
    verdicts: list[object] = [ValueError("once"), ValueError("twice"), 0.75]
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine) as made:
            judge: Judge = made.judge
            judge.verdict = lambda _: verdicts.pop(0)
            await made.push(1)
            batch = await made.take()
            assert batch["groups"][0]["samples"][0]["reward"] == 0.75
            assert batch["metrics"]["failed"] == {"judge_error": 2}
            assert batch["metrics"]["redone"] == 0


async def test_a_judge_that_hangs_ends_at_its_own_timeout() -> None:
    """`judge_timeout` counts from the start of the call: calls that queue behind a slow one are not blamed."""  # P21
    judger = {"path": "tests.support.judges:Judge", "timeout_s": 0.1, "concurrency": 1}
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine, judger=judger) as made:
            judge: Judge = made.judge
            judge.hold = True
            await made.push(3)
            await made.until(lambda: len(made.of(SampleFailed)) == 2)
            assert {failed.reason for failed in made.of(SampleFailed)} == {"judge_timeout"}
            assert len(judge.seen) <= 3
            judge.release()
            assert len((await made.take(groups=3))["groups"]) == 3


async def test_a_group_judge_that_fails_counts_against_every_member() -> None:
    """Too few verdicts, or an error, are typed failures of the whole group."""  # P21
    judger = {"path": "tests.support.judges:GroupJudge"}
    trainer = {"prompt_repeat_k": 2, "train_batch_size": 1}
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine, judger=judger, trainer=trainer) as made:
            judge: GroupJudge = made.judge
            judge.verdict = lambda _: [1.0]
            await made.push(1)
            await made.until(lambda: made.groups("failed") == 1)
            assert {failed.reason for failed in made.of(SampleFailed)} == {"judge_invalid"}
            assert made.samples("failed") == 2
            assert len(engine.requests) == 2


async def test_the_exact_judge_refuses_a_prompt_without_a_truth() -> None:
    """A prompt that cannot be judged is a failure, not a wrong answer."""  # P2
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine, judger={"name": "exact"}) as made:
            await made.push([{"id": "x", "input_ids": [1]}])
            with pytest.raises(NotNow):
                await made.take(timeout_s=0.3)
            assert made.groups("failed") == 1


async def test_an_engine_that_never_answers_is_given_up_in_time() -> None:
    """A request that is not answered by `request_timeout_s` is aborted and counted, and FAILED at last."""  # P4
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, request_timeout_s=0.15) as made:
        await made.until(lambda: made.groups("failed") == 1)
        assert [failed.reason for failed in made.of(SampleFailed)] == ["request_timeout"] * 3
        await engine.wait_aborts(3)
        assert [abort["rid"] for abort in engine.aborts] == [call.rid for call in engine.requests]
        assert not engine.live
