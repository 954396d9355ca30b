"""Weights broadcast to SGLang, vLLM and LMDeploy, which join a real gloo group and compare bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch

from rollout_svc.errors import NotNow
from rollout_svc.weights import staging
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.distributed import DistributedSender
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang, Hang
from tests.support.fake_vllm import FakeVLLM
from tests.support.group_member import GroupMember
from tests.support.stage import stage

TIMEOUT_S = 3.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Weights of two dtypes, one of which would not be aligned after the other, strided, of no dimension, and empty."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(17, 8, generator=generator).bfloat16(),
        "three": torch.randn(3, generator=generator).bfloat16(),
        "norm.weight": torch.randn(8, generator=generator),
        "strided": torch.randn(8, 6, generator=generator).t(),
        "scale": torch.randn((), generator=generator),
        "none": torch.empty(0, 4),
        "head.weight": torch.randn(64, 8, generator=generator),
    }


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit, dtypes and shapes included."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype is wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def paths(engine: FakeSGLang | FakeLMDeploy | FakeVLLM) -> list[str]:
    """The calls of its updates, repeats left out."""
    made = [path for path, _ in engine.updates]
    return [path for place, path in enumerate(made) if place == 0 or made[place - 1] != path]


async def test_each_kind_of_engine_has_what_was_broadcast() -> None:
    """P24: three kinds in one fleet, one SGLang with two ranks: each joins in its way, and twice all is there."""
    async with FakeSGLang() as sglang, FakeSGLang() as other, FakeLMDeploy() as lmdeploy, FakeVLLM() as vllm:
        sglang.told["tp_size"] = 2
        sglang.member = GroupMember(2)
        sglang.update_open = True  # somebody went without ending it
        vllm.transfer = "nccl"
        async with stage(sglang, other, lmdeploy, vllm) as made:
            sender = DistributedSender(512, timeout_s=TIMEOUT_S)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                for version in (1, 2):
                    record = await publisher.publish(tensors(version), version, pause={})
                    assert [outcome["ok"] for outcome in record["workers"].values()] == [True] * 4
                    for engine in (sglang, other, lmdeploy, vllm):
                        assert len(engine.member.groups) == 1, "the second update is in the group of the first"
                        for weights in engine.member.weights:
                            assert same(weights, tensors(version))
                        assert engine.member.buckets > 2 * version
                assert sglang.weight_version == vllm.weight_version == "2"
                assert not sglang.update_open
    joins = [path for path, _ in vllm.updates if path == "/init_weight_transfer_engine"]
    assert len(joins) == 1
    assert paths(vllm)[-4:] == [
        *("/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update")
    ]
    assert lmdeploy.updates[-1][1]["finished"] is True
    assert not lmdeploy.updates[-1][1]["names"]


async def test_one_that_refuses_its_bucket_is_left_out_and_named() -> None:
    """P24: engines that load as it comes: what ended half-way is out of traffic, and of no version."""
    async with FakeSGLang() as sglang, FakeVLLM() as vllm:
        vllm.transfer = "nccl"
        async with stage(sglang, vllm) as made:
            sender = DistributedSender(512, timeout_s=1.0)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                vllm.fail_update = True
                with pytest.raises(NotNow) as raised:
                    await publisher.publish(tensors(1), 1, pause={})
                assert "w1" in str(raised.value)
                assert made.worker(0).version is None
                assert made.worker(1).version is None
                assert vllm.weight_version == "loading 1"
                vllm.fail_update = False
                record = await publisher.publish(tensors(2), 2)
                assert [outcome["ok"] for outcome in record["workers"].values()] == [True, True]
                assert same(sglang.member.weights[0], tensors(2))
                assert same(vllm.member.weights[0], tensors(2))


async def test_one_that_does_not_join_holds_up_nobody_for_long() -> None:
    """P24: refused where the others wait for it: the trainer gives up in time, and with that all of them."""
    async with FakeSGLang() as one, FakeSGLang() as other:
        join = other.member.join

        async def refuse(*_: object, **__: object) -> None:
            raise OSError("no such interface")

        other.member.join = refuse  # type: ignore[method-assign]
        async with stage(one, other) as made:
            sender = DistributedSender(512, timeout_s=0.5)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                began = time.monotonic()
                with pytest.raises(NotNow) as raised:
                    await publisher.publish(tensors(1), 1, pause={})
                assert time.monotonic() - began < TIMEOUT_S
                assert "no such interface" in str(raised.value.detail)
                assert not one.member.groups
                other.member.join = join  # type: ignore[method-assign]
                assert (await publisher.publish(tensors(2), 2))["version"] == 2
                assert same(one.member.weights[0], tensors(2))
                assert same(other.member.weights[0], tensors(2))


async def test_one_that_answers_nothing_any_more_is_taken_leave_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """P24: everybody waits for the end of an update: the bound is on all that is said there, not on each word."""
    monkeypatch.setattr(staging, "_END_S", 0.3)
    said = ("/end_weight_update", "/destroy_weights_update_group")
    async with FakeSGLang() as one:
        for path in ("/update_weights_from_distributed", *said):
            one.script(path, Hang(), times=None)
        async with stage(one, weights={"update_timeout_s": 0.5}) as made:
            sender = DistributedSender(512, timeout_s=0.5)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                with pytest.raises(NotNow):
                    await publisher.publish(tensors(1), 1, pause={})
        assert [path for _, path in one.hits if path in said] == ["/end_weight_update"]


async def test_an_older_sglang_has_no_sessions() -> None:
    """Before 2026-06 it knows no `/begin_weight_update`: it is loaded without."""
    async with FakeSGLang() as sglang:
        sglang.update_sessions = False
        async with (
            stage(sglang) as made,
            WeightPublisher(made.service, way="distributed", bucket_bytes=512) as publisher,
        ):
            assert (await publisher.publish(tensors(1), 1, pause={}))["version"] == 1
            assert same(sglang.member.weights[0], tensors(1))
            assert sglang.weight_version == "1"


@pytest.mark.parametrize("told", [{"dp_size": 2}, {"weight_transports": ["disk"]}])
async def test_one_that_cannot_is_refused_by_name(told: dict[str, object]) -> None:
    """P24: said before anything is sent."""
    async with FakeSGLang() as sglang:
        sglang.told |= told
        async with stage(sglang) as made, WeightPublisher(made.service, way="distributed") as publisher:
            with pytest.raises(NotNow, match="w0") as raised:
                await publisher.publish(tensors(1), 1, pause={})
            assert "takes no weights by distributed" in str(raised.value.detail)
            assert "takes no weights by distributed" in str(raised.value), "and in what a traceback shows"
            assert made.service.state == "running", "known before anything is stopped"


async def test_sglang_says_that_its_weights_are_of_no_version() -> None:
    """P24: from before its first bucket: a service that is started meanwhile sees the label, and nothing else."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError("out of memory")

    async with FakeSGLang(weight_version="0") as one, FakeSGLang(weight_version="0") as other:
        async with stage(one, other) as made:
            sender = DistributedSender(512, timeout_s=1.0)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                other.member.receive = refuse  # type: ignore[method-assign]
                with pytest.raises(NotNow):
                    await publisher.publish(tensors(1), 1, pause={})
        assert {one.weight_version, other.weight_version} == {"loading 1"}
        async with stage(one, other, ready=False) as made:
            await made.until(lambda: all("never ended" in made.worker(number).reason for number in (0, 1)))
            assert made.service.workers()[0]["state"] == "QUARANTINED"


@pytest.mark.parametrize("at_fault", ["vllm", "sglang"])
async def test_a_round_of_vllm_that_broke_off_is_ended_before_the_next(at_fault: str) -> None:
    """P24: whether it failed there or elsewhere: no round stays open, and none begins over the remains of another."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError("out of memory")

    async with FakeSGLang() as sglang, FakeVLLM() as vllm:
        vllm.transfer = "nccl"
        async with stage(sglang, vllm) as made:
            sender = DistributedSender(512, timeout_s=1.0)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                member = (vllm if at_fault == "vllm" else sglang).member
                receive, member.receive = member.receive, refuse  # type: ignore[method-assign]
                with pytest.raises(NotNow):
                    await publisher.publish(tensors(1), 1, pause={})
                assert not vllm.round_open
                assert vllm.weight_version == "loading 1"
                member.receive = receive  # type: ignore[method-assign]
                record = await publisher.publish(tensors(2), 2)
                assert [outcome["ok"] for outcome in record["workers"].values()] == [True, True]
                assert not vllm.poisoned
                assert vllm.weight_version == "2"


async def test_a_round_of_vllm_that_nobody_ended_is_ended_first() -> None:
    """P24: a service that died left it open; the next one's update ends it, or would be refused time and again."""
    async with FakeSGLang() as sglang, FakeVLLM() as vllm:
        vllm.transfer = "nccl"
        async with stage(sglang, vllm) as made:
            made.worker(1).put_in_quarantine("version", "it was met half-way")
            vllm.set_version("loading 1")
            vllm.round_open = True
            sender = DistributedSender(512, timeout_s=1.0)
            async with WeightPublisher(made.service, way=sender, bucket_bytes=512) as publisher:
                record = await publisher.publish(tensors(2), 2, pause={})
            assert [outcome["ok"] for outcome in record["workers"].values()] == [True, True]
            assert not vllm.poisoned
