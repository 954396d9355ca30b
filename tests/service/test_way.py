"""The way of a sample: one prompt, one engine, one batch, and every record on the way to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_svc.judging import Reward
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.judges import GroupJudge
from tests.support.loops import TOOL_IDS, ToolUser
from tests.support.stage import PROMPT, lines, stage

SAMPLE_KEYS = {
    *("sample_id", "status", "finish_reason", "engine_finish_reason", "reward", "prompt_ids", "response_ids"),
    *("logprobs", "loss_mask", "weight_versions", "response", "meta"),
}
GROUP_KEYS = {"group_id", "task", "prompt", "samples"}
BATCH_KEYS = {"batch_id", "step", "groups", "metrics"}
FIGURES = {
    *("groups", "samples", "reward_mean", "reward_std", "response_length_mean", "response_length_min"),
    "reward_samples",
    *("response_length_max", "staleness", "mixed_versions", "masked_tokens"),
}
METRICS_KEYS = FIGURES | {
    *("aborted", "continued", "redone", "failed", "settled", "wait_s", "pause_s", "tasks", "max_token_staleness"),
}
STATUS_KEYS = {
    *("state", "ticket", "weight_version", "lanes", "workers", "buffer", "ledger", "plan", "rss_bytes"),
}
WORKER_KEYS = {"id", "url", "dialect", "state", "in_flight", "limit", "capabilities"}
PLAN_KEYS = {"workers", "required", "allowed", "ratio", "max_groups", "warnings"}
REPORT_KEYS = {
    *("ticket", "mode", "clean", "elapsed_s", "rungs", "workers", "parked", "abandoned", "ledger"),
    *("offloaded", "not_offloaded"),
}
ACCOUNTS = {
    *("admitted", "queued", "in_flight", "aborted", "ready", "leased", "consumed", "filtered", "expired", "failed"),
}
BEYOND_SAMPLE = {"reward_parts"}
BEYOND_STATUS = {"producer", "weights", "evaluations", "trajectories", "tensors", "memory", "judges", "sessions"}
BEYOND_WORKER = {
    *("tokens_in_flight", "incarnation", "frozen", "reason", "weight_version", "engine_version", "model"),
    *("process", "engines", "asleep"),
}
"""Keys beside the contract's: said here so that no further one slips in."""


def assert_ledger(record: dict[str, Any], **groups: int) -> None:
    """The record has exactly the contract's keys, and these groups in these accounts, the others empty."""
    assert set(record) == {"groups", "samples", "late_discarded", "redone"}
    assert set(record["groups"]) == ACCOUNTS
    assert set(record["samples"]) == ACCOUNTS
    assert record["groups"] == dict.fromkeys(ACCOUNTS, 0) | groups


async def test_one_prompt_one_engine_one_batch() -> None:
    """A prompt becomes a judged sample in a leased batch, and is consumed by its ack; each record is the contract's."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        made.judge.verdict = lambda _: Reward(0.5, {"form": 1.0})
        await engine.wait_running(1)
        call = engine.requests[0]
        assert call.prompt_ids == [*PROMPT, 0]
        assert call.max_new_tokens == 16
        assert call.body["return_logprob"] is True
        engine.release(tokens=[5, 6, 7])
        batch = await made.take()
        assert set(batch) == BATCH_KEYS
        assert batch["step"] == 0
        [group] = batch["groups"]
        assert set(group) == GROUP_KEYS
        assert group["task"] == "t"
        assert group["prompt"]["id"] == "p0"
        [sample] = group["samples"]
        assert set(sample) == SAMPLE_KEYS | BEYOND_SAMPLE
        assert {key: sample[key] for key in SAMPLE_KEYS - {"sample_id"}} == {
            "status": "COMPLETED",
            "finish_reason": "stop",
            "engine_finish_reason": "stop",
            "reward": 0.5,
            "prompt_ids": [*PROMPT, 0],
            "response_ids": [5, 6, 7],
            "logprobs": [-1.5] * 3,
            "loss_mask": [1, 1, 1],
            "weight_versions": [{"version": 0, "start": 0, "end": 3}],
            "response": None,
            "meta": {"logprobs_mode": "raw"},
        }
        metrics = batch["metrics"]
        assert set(metrics) == METRICS_KEYS
        assert set(metrics["tasks"]["t"]) == FIGURES
        assert (metrics["reward_mean"], metrics["staleness"], metrics["continued"]) == (0.5, {"0": 1}, 0)
        assert_ledger(made.service.status()["ledger"], admitted=1, leased=1)
        assert await made.service.ack(batch["batch_id"]) == {"batch_id": batch["batch_id"], "acknowledged": True}
        assert_ledger(made.service.status()["ledger"], admitted=1, consumed=1)


async def test_status_and_plan_are_the_contracts() -> None:
    """`status` and `plan` have the contract's keys, and say what is the case."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2) as made:
        await engine.wait_running(2)
        status = made.service.status()
        assert set(status) == STATUS_KEYS | BEYOND_STATUS
        assert status["lanes"] == {
            "train": {"open": True, "in_flight": 2, "parked": 0},
            "eval": {"open": True, "in_flight": 0, "parked": 0},
        }
        [worker] = status["workers"]
        assert set(worker) == WORKER_KEYS | BEYOND_WORKER
        assert (worker["id"], worker["url"], worker["dialect"]) == ("w0", engine.url, "sglang")
        assert (worker["state"], worker["in_flight"], worker["limit"]) == ("ACTIVE", 2, 77)
        assert set(status["plan"]) == PLAN_KEYS
        assert status["plan"] == made.service.concurrency()
        assert (status["plan"]["required"], status["plan"]["max_groups"]) == (4, 8)
        assert_ledger(status["ledger"], admitted=2, in_flight=2)
        assert status["rss_bytes"] > 0
        json.dumps(status)


async def test_the_report_of_a_clean_pause_is_the_contracts() -> None:
    """`pause` answers with a PauseReport of exactly the contract's keys."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2) as made:
        await engine.wait_running(2)
        report = (await made.pause()).as_json()
        assert set(report) == REPORT_KEYS
        assert (report["ticket"], report["mode"], report["clean"]) == (1, "abort", True)
        assert report["workers"] == {
            "w0": {"in_flight": 2, "answered": 2, "late": 0, "cancelled": 0, "abandoned": 0, "residual": 0}
        }
        assert [rung["name"] for rung in report["rungs"]] == ["gate", "abort", "report"]
        assert all(set(rung) == {"name", "at_s", "pending"} for rung in report["rungs"])
        assert (report["parked"], report["abandoned"]) == ([], [])
        assert_ledger(report["ledger"], admitted=2, aborted=2)
        json.dumps(report)


async def test_a_file_is_read_in_passes_and_ends(tmp_path: Path) -> None:
    """A JSONL source gives each line once per pass; two passes of two lines are four groups, then it is exhausted."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(2)))
    prompts = {"jsonl": str(path), "shuffle": False, "epochs": 2}
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine, prompts=prompts) as made:
            batch = await made.take(groups=4)
            assert sorted(group["prompt"]["id"] for group in batch["groups"]) == ["p0", "p0", "p1", "p1"]
            assert len({group["group_id"] for group in batch["groups"]}) == 4
            await made.service.ack(batch["batch_id"])
            await made.until(lambda: made.parts.producer.exhausted)


async def test_text_goes_in_and_comes_out() -> None:
    """With a tokenizer the prompt is encoded, the response decoded, and the judger sees text."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=[*b"42", 256])
        prompts = {"text": "6*7=", "ground_truth": "42", "meta": {"kind": "product"}}
        async with stage(engine, tokenizer={"path": "bytes"}, judger={"name": "exact"}) as made:
            assert await made.push([prompts, prompts]) == 1
            [group] = (await made.take())["groups"]
            [sample] = group["samples"]
            assert sample["prompt_ids"] == list(b"6*7=")
            assert (sample["response"], sample["reward"], sample["meta"]) == (
                "42",
                1.0,
                {"kind": "product", "logprobs_mode": "raw"},
            )
            assert sample["response_ids"] == [*b"42", 256]


async def test_a_group_has_k_samples_under_seeds_of_their_own() -> None:
    """Each member of a group draws from its own seed, and the group is handed over whole."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda call: Reply(tokens=[call.sampling["sampling_seed"]])
        trainer = {"prompt_repeat_k": 3}
        async with stage(engine, pushed=1, trainer=trainer, sampling={"seed": 40, "max_tokens": 4}) as made:
            [group] = (await made.take())["groups"]
            assert sorted(sample["response_ids"] for sample in group["samples"]) == [[40], [41], [42]]
            assert len({sample["sample_id"] for sample in group["samples"]}) == 3


async def test_a_group_judger_sees_all_members_at_once() -> None:
    """A judger with `judge_group` is called once per group, when every member has its answer."""
    async with FakeSGLang(weight_version="0") as engine:
        judger = {"path": "tests.support.judges:GroupJudge"}
        async with stage(engine, pushed=1, trainer={"prompt_repeat_k": 3}, judger=judger) as made:
            judge: GroupJudge = made.judge
            await engine.wait_running(3)
            engine.release(engine.requests[0])
            engine.release(engine.requests[1])
            await made.until(lambda: made.parts.pool.in_flight["train"] == 1)
            assert not judge.seen
            engine.release()
            [group] = (await made.take())["groups"]
            assert [len(samples) for samples in judge.seen] == [3]
            assert [sample["reward"] for sample in group["samples"]] == [0.0, 1.0, 2.0]


async def test_tokens_of_a_tool_are_masked() -> None:
    """Tokens an agent puts between two turns have mask 0 and logprob 0.0; the second turn is asked after all of it."""

    def answer(call: Call) -> Reply:
        return Reply(tokens=[1, 2] if len(call.prompt_ids) == 4 else [3])

    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = answer
        async with stage(engine, pushed=1, agent={"path": "tests.support.loops:ToolUser"}) as made:
            loop: ToolUser = made.agent
            loop.go_on.set()
            [[sample]] = [group["samples"] for group in (await made.take())["groups"]]
            assert engine.requests[1].prompt_ids == [*PROMPT, 0, 1, 2, *TOOL_IDS]
            assert sample["response_ids"] == [1, 2, *TOOL_IDS, 3]
            assert sample["loss_mask"] == [1, 1, 0, 0, 1]
            assert sample["logprobs"] == [-1.5, -1.5, 0.0, 0.0, -1.5]
            assert sample["weight_versions"] == [
                {"version": 0, "start": 0, "end": 2},
                {"version": 0, "start": 4, "end": 5},
            ]


async def test_the_fleet_is_kept_at_its_target_and_the_bound_holds() -> None:
    """Requests under way reach `required` per worker; groups not consumed never exceed `max_groups` (section 11)."""
    trainer = {"train_batch_size": 6}
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=20, trainer=trainer) as made,
    ):
        assert made.service.concurrency()["required"] == 3
        await made.until(lambda: one.running == 3 and two.running == 3, "both engines at their target")
        for engine in (one, two):
            engine.answer = lambda _: Reply(tokens=1)
            engine.release(tokens=1)
        await made.until(lambda: made.groups("ready") == 12)
        await made.until(lambda: made.parts.producer.waiting == "max_groups")
        assert made.groups("admitted") == 12
        batch = await made.take(groups=6)
        await made.service.ack(batch["batch_id"])
        await made.until(lambda: made.parts.producer.waiting == "batch_under_way")  # these weights serve one more
        assert made.groups("admitted") == 12
        await made.service.update_weights(1, {"kind": "disk", "path": "/w"}, pause={})
        await made.until(lambda: made.groups("admitted") == 18)
