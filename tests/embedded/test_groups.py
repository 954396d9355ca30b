"""Weights broadcast to the built-in engine in a trainer's group: its routes, spoken to as a trainer for SGLang does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from rollout_svc.collective import Collective, Doing, Meeting
from rollout_svc.embedded.groups import MAX_GROUPS
from tests.embedded.helpers import Served, served, small_model

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
"""Nothing here waits for it to pass: a machine that is busy elsewhere may take its time to meet."""
NAME = "weight_update_group"


def joining(meeting: Meeting, **changed: Any) -> dict[str, Any]:
    """The body of a call to join as the one member beside the trainer."""
    where = {"master_address": HOST, "master_port": meeting.port, "rank_offset": 1, "world_size": 2}
    return {**where, "group_name": NAME, "backend": "gloo", "timeout_s": TIMEOUT_S} | changed


def about(tensors: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """The body of a call to receive."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": NAME,
        "flush_cache": True,
    } | more


@asynccontextmanager
async def trainer(engine: Served, name: str = NAME) -> AsyncIterator[Collective]:
    """Rank 0 of a group that the engine is in."""
    meeting = Meeting(HOST, TIMEOUT_S)
    own = Doing("join", lambda: Collective("gloo", (HOST, meeting.port), 0, 2, name, TIMEOUT_S))
    status, said = await engine.call("/init_weights_update_group", joining(meeting, group_name=name))
    assert status == 200, said
    group = await asyncio.to_thread(own.result, TIMEOUT_S)
    try:
        yield group
    finally:
        await asyncio.to_thread(group.close)
        meeting.close()


async def send(group: Collective, engine: Served, call: dict[str, Any], sent: list[torch.Tensor]) -> tuple[int, Any]:
    """Broadcast, and have it received."""
    doing = Doing("broadcast", lambda: group.broadcast(sent))
    told = await engine.call("/update_weights_from_distributed", call)
    await asyncio.to_thread(doing.result, TIMEOUT_S)
    return told


async def test_a_trainer_for_sglang_is_understood() -> None:
    """P7: tensor by tensor, and flat; the label that comes with a bucket is that of the weights when they are whole."""
    wanted = small_model(seed=1).state_dict()
    half = len(wanted) // 2
    first, rest = dict(list(wanted.items())[:half]), dict(list(wanted.items())[half:])
    async with served(is_open=True) as engine, trainer(engine) as group:
        assert (await engine.call("/begin_weight_update", {}))[0] == 200
        told = await send(group, engine, about(first, weight_version="7"), list(first.values()))
        assert told[0] == 200, told
        flat = torch.cat([tensor.flatten() for tensor in rest.values()])
        told = await send(group, engine, about(rest, load_format="flattened_bucket", weight_version="7"), [flat])
        assert told[0] == 200, told
        assert engine.engine.version != "7"
        assert (await engine.call("/end_weight_update", {}))[0] == 200
        assert engine.engine.version == "7"
        found = dict(engine.scheduler.model.named_parameters())
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert (await engine.call("/destroy_weights_update_group", {"group_name": NAME}))[0] == 200
        status, said = await engine.call("/destroy_weights_update_group", {"group_name": NAME})
        assert (status, said["success"]) == (400, False)


async def test_a_flat_bucket_has_no_gaps() -> None:
    """As SGLang flattens: what lies where no item of its dtype may is read all the same, and then refused by name."""
    odd = {"a": torch.ones(3).bfloat16(), "b": torch.full((2,), 3.0)}
    flat = torch.cat([tensor.view(torch.uint8) for tensor in odd.values()])
    async with served(is_open=True) as engine, trainer(engine) as group:
        received = Doing("r", lambda: engine.engine._groups.receive(about(odd, load_format="flattened_bucket")))
        await asyncio.to_thread(group.broadcast, [flat])
        tensors = (await asyncio.to_thread(received.result, TIMEOUT_S)).tensors
        assert all(torch.equal(tensor, odd[name]) for name, tensor in tensors)
        await engine.call("/begin_weight_update", {})
        status, said = await send(group, engine, about(odd, load_format="flattened_bucket"), [flat])
        assert status == 400
        assert "unknown a" in said["message"]


async def test_a_bucket_of_an_update_that_ended_is_none_of_the_next() -> None:
    """P24: abandoned while the trainer is silent, at once; what comes then is refused, and nothing of it is staged."""
    wanted = small_model(seed=1).state_dict()
    async with served(is_open=True) as engine, trainer(engine) as group:
        await engine.call("/begin_weight_update", {})
        late = asyncio.get_running_loop().create_task(
            engine.call("/update_weights_from_distributed", about(wanted)), name="late"
        )
        await engine.until(lambda: engine.engine._groups._groups[NAME]._busy)
        assert (await engine.call("/abandon_weight_update", {}))[0] == 200
        assert (await engine.call("/begin_weight_update", {}))[0] == 200
        await asyncio.to_thread(group.broadcast, list(wanted.values()))
        status, said = await late
        assert status == 400
        assert "ended while" in said["message"]
        status, said = await engine.call("/end_weight_update", {})
        assert status == 400
        assert "missing" in said["message"]


async def test_a_trainer_that_goes_ends_the_wait() -> None:
    """Not a timeout: its leaving does; the group is gone, and the engine serves on."""
    wanted = small_model(seed=1).state_dict()
    async with served(is_open=True) as engine:
        async with trainer(engine) as group:
            await engine.call("/begin_weight_update", {})
            waiting = asyncio.get_running_loop().create_task(
                engine.call("/update_weights_from_distributed", about(wanted)), name="waiting"
            )
            await engine.until(lambda: engine.engine._groups._groups[NAME]._busy)
            await asyncio.to_thread(group.close)
            status, said = await waiting
            assert status == 400
            assert NAME in said["message"]
        assert engine.engine._groups.names == ()
        assert (await engine.generate("after", 4))[0] == 200


async def test_groups_of_trainers_that_went_are_not_kept_for_good() -> None:
    """The oldest goes when there are too many; one of the same name is refused."""
    async with served(is_open=True) as engine:
        for number in range(MAX_GROUPS + 2):
            async with trainer(engine, f"g{number}"):
                pass
        assert engine.engine._groups.names == tuple(f"g{number}" for number in range(2, MAX_GROUPS + 2))
        meeting = Meeting(HOST, TIMEOUT_S)
        status, said = await engine.call("/init_weights_update_group", joining(meeting, group_name="g3"))
        meeting.close()
        assert status == 400
        assert "exists already" in said["message"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"backend": "nccl"}, "needs 'gloo'"),
        ({"backend": None}, "backend"),
        ({"rank_offset": 0}, "expected 1 to 1"),
        ({"rank_offset": 2}, "expected 1 to 1"),
        ({"world_size": "2"}, "world_size"),
        ({"master_port": -1}, "master_port"),
        ({"master_address": 5}, "master_address"),
        ({"group_name": ""}, "group_name"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"timeout_s": 0.1}, "did not meet"),
    ],
)
async def test_what_is_no_group_is_refused(changed: dict[str, Any], told: str) -> None:
    """P35: by the name of what is wrong; nobody is waited for any longer than was asked for."""
    meeting = Meeting(HOST, TIMEOUT_S)
    async with served(is_open=True) as engine:
        status, said = await engine.call("/init_weights_update_group", joining(meeting, **changed))
        assert status == 400
        assert told in said["message"]
        assert engine.engine._groups.names == ()
    meeting.close()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"names": None}, "three lists"),
        ({"names": []}, "the same tensors"),
        ({"dtypes": ["float32", "float32"]}, "the same tensors"),
        ({"dtypes": ["float33"]}, "float33"),
        ({"dtypes": [None]}, "none called None"),
        ({"names": [1]}, "no tensor"),
        ({"shapes": [3]}, "no tensor"),
        ({"shapes": [[-3]]}, "shapes"),
        ({"shapes": [[2**62]]}, "no room"),
        ({"load_format": "direct"}, "load_format"),
        ({"group_name": "other"}, "was not joined"),
    ],
)
async def test_what_is_no_bucket_is_refused(changed: dict[str, Any], told: str) -> None:
    """P35: by the name of what is wrong, before anything is waited for; the group lasts."""
    async with served(is_open=True) as engine, trainer(engine):
        call = about({"norm.bias": torch.zeros(64)}) | changed
        status, said = await engine.call("/update_weights_from_distributed", call)
        assert status == 400
        assert "no update was begun" in said["message"]
        await engine.call("/begin_weight_update", {})
        status, said = await engine.call("/update_weights_from_distributed", call)
        assert status == 400
        assert told in said["message"]
        assert engine.engine._groups.names == (NAME,)
