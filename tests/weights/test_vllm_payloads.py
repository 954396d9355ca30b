"""What vLLM is sent: read by its own rules, every tensor is there bit for bit."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings

from rollout_svc.engines.calls import Call
from rollout_svc.weights.payloads import vllm
from rollout_svc.weights.payloads.vllm import PackedBuffer
from tests.support.vllm_weights import Worker
from tests.weights.test_payloads import Named, mixed, same

CPU = torch.device("cpu")
UUID = "GPU-1"
ROOM = 4096


def body(call: Call) -> Any:
    """What a call carries."""
    assert call.method == "POST"
    assert call.admin
    return None if call.body is None else orjson.loads(call.body)


@settings(max_examples=40, deadline=None)
@given(mixed)
def test_chunks_are_split_by_sizes_into_what_was_sent(tensors: list[Named]) -> None:
    """P26: one buffer, opened once, written chunk after chunk; any dtypes, strided sources too."""
    tensors = [(name, tensor if tensor.dim() else tensor.reshape(1)) for name, tensor in tensors]
    worker, buffer = Worker(UUID, packed=True), PackedBuffer(ROOM, "cpu", UUID)
    for chunk in vllm.cut_packed(tensors, ROOM // 8):
        call = vllm.update(buffer.info(chunk))
        assert call.path == "/update_weights"
        worker.update(body(call)["update_info"])
    assert same(worker.weights, tensors)
    assert worker.opened == 1


@settings(max_examples=20, deadline=None)
@given(mixed)
def test_each_tensor_by_a_handle_of_its_own(tensors: list[Named]) -> None:
    """P26: unpacked, tensors are read where they lie; one that is strided would be a copy nobody keeps."""
    worker = Worker(UUID, packed=False)
    kept = [(name, tensor.contiguous()) for name, tensor in tensors]
    worker.update(orjson.loads(orjson.dumps(vllm.ipc_info(kept, {CPU: UUID}))))
    assert same(worker.weights, kept)
    with pytest.raises(ValueError, match="'w': expected a contiguous tensor"):
        vllm.ipc_info([("w", torch.ones(4, 4)[:, ::2])], {CPU: UUID})


def test_a_chunk_ends_before_a_tensor_that_could_not_be_read() -> None:
    """P26: fp32 after three bf16 begins the next chunk; in one chunk it is refused before a byte is written."""
    tensors = [("half", torch.arange(3).bfloat16()), ("whole", torch.ones(2)), ("more", torch.ones(2))]
    chunks = [[name for name, _ in chunk] for chunk in vllm.cut_packed(tensors, ROOM)]
    assert chunks == [["half"], ["whole", "more"]]
    assert [len(chunk) for chunk in vllm.cut_packed(tensors[1:], 8)] == [1, 1]
    buffer = PackedBuffer(ROOM, "cpu", UUID)
    buffer.tensor.zero_()
    with pytest.raises(ValueError, match=r"'whole' of torch.float32 cannot be read at byte 6"):
        buffer.info(tensors)
    with pytest.raises(ValueError, match="expected at most 4096 bytes, not 8192"):
        buffer.info([("big", torch.ones(2048))])
    assert not buffer.tensor.any()
    with pytest.raises(ValueError, match="'big' has 32 bytes, a chunk 8"):
        list(vllm.cut_packed([("big", torch.ones(8))], 8))


def test_a_scalar_is_not_packed() -> None:
    """P24: the engine would fail on it in the middle of a round, with no weights; unpacked it takes it."""
    scalar = [("scale", torch.tensor(2.0))]
    with pytest.raises(ValueError, match="'scale' is a scalar"):
        PackedBuffer(ROOM, "cpu", UUID).info(scalar)
    with pytest.raises(ValueError, match="'scale' is a scalar"):
        list(vllm.cut_packed(scalar, ROOM))
    worker = Worker(UUID, packed=False)
    worker.update(vllm.ipc_info(scalar, {CPU: UUID}))
    assert same(worker.weights, scalar)


def test_calls_of_a_round() -> None:
    """P24: joined once, then start, updates, finish with the version; nccl is told names, dtypes and shapes alone."""
    joining = vllm.init_nccl("10.0.0.1", 29500, rank_offset=1, world_size=3)
    assert joining.path == "/init_weight_transfer_engine"
    assert body(joining) == {
        "init_info": {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "packed": False,
        }
    }
    packed = body(vllm.init_nccl("h", 1, rank_offset=1, world_size=2, packed_bytes=64))["init_info"]
    assert (packed["packed"], packed["packed_buffer_size_bytes"]) == (True, 64)
    assert body(vllm.init_ipc(packed=True)) == {"init_info": {"packed": True}}
    assert (vllm.start().path, body(vllm.start())) == ("/start_weight_update", None)
    told = vllm.describe([("a", torch.ones(2, 3).bfloat16())])
    assert body(vllm.update(told)) == {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}}
    assert body(vllm.update([told, told]))["update_info"] == [told, told]
    assert (vllm.finish(7).path, body(vllm.finish(7))) == ("/finish_weight_update", {"weight_version": "7"})
