"""Whole updates of faked SGLang and LMDeploy engines over HTTP, by their own protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from rollout_svc.engines.calls import Call, Reply
from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.bucket import cut
from rollout_svc.weights.payloads.lmdeploy import LMDeployRound
from rollout_svc.weights.payloads.session import Ask, update_lmdeploy, update_sglang
from tests.support.client import Client
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.lmdeploy_weights import Rank
from tests.weights.test_payloads import Named, same

TENSORS: list[Named] = [
    ("half", torch.arange(3).bfloat16()),
    ("whole", torch.arange(6.0).reshape(2, 3).t()),
    ("more", torch.arange(8.0)[::2]),
]
BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"


def asking(client: Client) -> Ask:
    """Make calls of one engine through a client's session."""

    async def ask(call: Call) -> Reply:
        headers = {"Content-Type": "application/json"}
        async with client.session.post(client.engine.url + call.path, data=call.body, headers=headers) as response:
            return Reply(response.status, await response.read())

    return ask


def buckets() -> list[Sequence[Named]]:
    """Two buckets, the first of two dtypes."""
    return [TENSORS[:2], TENSORS[2:]]


def paths(engine: FakeSGLang) -> list[str]:
    """What it was asked, in order."""
    return [path for _, path in engine.hits]


@pytest.mark.parametrize("sessions", [True, False])
async def test_sglang_has_what_was_sent_and_the_version_with_the_last(sessions: bool) -> None:
    """P7 P24: two ranks, bit for bit; opened and closed where the engine has that; nothing flushed or aborted."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.update_sessions, engine.ranks = sessions, [{}, {}]
        await update_sglang(asking(client), buckets(), 7, ranks=2)
        assert all(same(weights, TENSORS) for weights in engine.ranks)
        assert paths(engine) == [BEGIN, UPDATE, UPDATE, *([END] if sessions else [])]
        bodies = [body for _, body in engine.updates]
        assert [body.get("weight_version") for body in bodies] == [None, "7"]
        assert not any(body["flush_cache"] or body["abort_all_requests"] for body in bodies)
        assert engine.weight_version == "7"
        assert not engine.update_open


async def test_sglang_is_closed_after_a_failure_and_before_another() -> None:
    """P24: a refused bucket ends the update and closes it; one that was left open is closed before the next."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.fail_update = "no"
        with pytest.raises(WorkerFailure, match="no"):
            await update_sglang(asking(client), buckets(), 7)
        assert paths(engine) == [BEGIN, UPDATE, END]
        assert engine.weight_version == "default"
        engine.fail_update, engine.update_open = False, True
        engine.hits.clear()
        await update_sglang(asking(client), buckets(), 8)
        assert paths(engine) == [BEGIN, END, BEGIN, UPDATE, UPDATE, END]
        assert same(engine.ranks[0], TENSORS)
        with pytest.raises(ValueError, match="at least one bucket"):
            await update_sglang(asking(client), [], 9)


async def test_sglang_is_closed_where_the_caller_leaves() -> None:
    """P14 P24: a cancelled update says so after it closed what it had opened."""
    async with FakeSGLang() as engine, Client(engine) as client:
        post, arrived = asking(client), asyncio.Event()

        async def ask(call: Call) -> Reply:
            if call.path == UPDATE:
                arrived.set()
                await asyncio.Event().wait()
            return await post(call)

        updating = asyncio.ensure_future(update_sglang(ask, buckets(), 7))
        await arrived.wait()
        updating.cancel()
        await asyncio.wait([updating], timeout=5)
        assert updating.cancelled()
        assert paths(engine) == [BEGIN, END]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_lmdeploy_has_what_was_sent(ranks: int) -> None:
    """P24 P26: cut by dtype, `finished` with the last; the next update begins with its buffer again."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.ranks = [Rank() for _ in range(ranks)]
        sender = LMDeployRound(ranks=ranks)
        for factor in (1, 2):
            wanted = [(name, tensor * factor) for name, tensor in TENSORS]
            await update_lmdeploy(asking(client), sender, cut(wanted, 2**20, "elements"))
            assert all(same(rank.weights, wanted) for rank in engine.ranks)
        assert [body["finished"] for _, body in engine.updates] == [False, True] * 2
        with pytest.raises(ValueError, match="at least one bucket"):
            await update_lmdeploy(asking(client), sender, [])


async def test_lmdeploy_starts_over_after_a_failure() -> None:
    """P24 P26: a failed call ends the update; the next one is whole."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        sender = LMDeployRound()
        engine.fail_update = True
        with pytest.raises(WorkerFailure, match="500"):
            await update_lmdeploy(asking(client), sender, cut(TENSORS, 2**20, "elements"))
        assert len(engine.updates) == 1
        engine.fail_update = False
        await update_lmdeploy(asking(client), sender, cut(TENSORS, 2**20, "elements"))
        assert same(engine.ranks[0].weights, TENSORS)
