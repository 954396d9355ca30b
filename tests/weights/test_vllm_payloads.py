"""What vLLM is sent: read by its own rules, every tensor is there bit for bit."""

from __future__ import annotations

import orjson
import pytest
import torch
from hypothesis import given, settings

from rollout_svc.weights.payloads import vllm
from tests.support.vllm_weights import Worker
from tests.weights.test_payloads import Named, mixed, same

CPU = torch.device("cpu")
UUID = "GPU-1"


@settings(max_examples=40, deadline=None)
@given(mixed)
def test_each_tensor_by_a_handle_of_its_own(tensors: list[Named]) -> None:
    """P26: tensors are read where they lie, scalars too; one that is strided would be a copy nobody keeps."""
    worker = Worker(UUID)
    kept = [(name, tensor.contiguous()) for name, tensor in tensors]
    worker.update(orjson.loads(orjson.dumps(vllm.ipc_info(kept, {CPU: UUID}))))
    assert same(worker.weights, kept)
    with pytest.raises(ValueError, match="'w': expected a contiguous tensor"):
        vllm.ipc_info([("w", torch.ones(4, 4)[:, ::2])], {CPU: UUID})


def test_tensors_are_named_as_in_a_checkpoint() -> None:
    """P26: names, dtypes and shapes in plain JSON, in the order they come."""
    told = vllm.describe([("a", torch.ones(2, 3).bfloat16()), ("b", torch.tensor(1))])
    assert told == {"names": ["a", "b"], "dtype_names": ["bfloat16", "int64"], "shapes": [[2, 3], []]}
