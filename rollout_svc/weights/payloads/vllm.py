"""What vLLM's weight transfer is sent: names, dtypes and shapes in JSON; for IPC also where the bytes lie.

`init_weight_transfer_engine` once, then in each round `start_weight_update`, any number of `update_weights`, and
`finish_weight_update`. With backend `nccl` the calls block until the trainer's side joins: issue both at once.

Invariants:

- A packed chunk has no gaps (its receiver splits it by sizes alone), so a tensor that could not be viewed where it
  would lie begins a chunk of its own: `cut_packed`.
- Nothing is sent that is known to fail there: once a round is open, an engine that fails has no weights.
- A buffer is exported once, and the same handle sent with each of its chunks: its receiver opens it once.
- It is not written to again before the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.weights.payloads.pickling import dumps, handle_of

if TYPE_CHECKING:
    import torch

__all__ = ["PackedBuffer", "cut_packed", "describe", "finish", "init_ipc", "init_nccl", "ipc_info", "start", "update"]

Named = tuple[str, "torch.Tensor"]


def init_nccl(address: str, port: int, *, rank_offset: int, world_size: int, packed_bytes: int | None = None) -> Call:
    """Have the engine join the trainer's group; it answers once the trainer has joined as rank 0.

    Args:
        address: of the trainer's rendezvous.
        port: likewise.
        rank_offset: rank of this engine's first worker.
        world_size: the trainer and every worker.
        packed_bytes: size of the chunks both sides flatten to; None: tensor by tensor.
    """
    info: dict[str, Any] = {
        "master_address": address,
        "master_port": port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "packed": packed_bytes is not None,
    }
    if packed_bytes is not None:
        info["packed_buffer_size_bytes"] = packed_bytes
    return _post("/init_weight_transfer_engine", {"init_info": info})


def init_ipc(*, packed: bool) -> Call:
    """Have the engine expect handles of memory on its own devices."""
    return _post("/init_weight_transfer_engine", {"init_info": {"packed": packed}})


def start() -> Call:
    """Open a round: from here on the engine has no weights until `finish`."""
    return Call("POST", "/start_weight_update", None, admin=True)


def update(info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Call:
    """Load what is described; a list: one description for each worker."""
    return _post("/update_weights", {"update_info": info})


def finish(version: int) -> Call:
    """Close the round, and label the weights."""
    return _post("/finish_weight_update", {"weight_version": str(version)})


def describe(tensors: Iterable[Named]) -> dict[str, Any]:
    """Name tensors in the order they will come: all that `nccl` is told."""
    listed = list(tensors)
    return {
        "names": [name for name, _ in listed],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in listed],
        "shapes": [list(tensor.shape) for _, tensor in listed],
    }


def ipc_info(tensors: Sequence[Named], uuids: Mapping[torch.device, str] | None = None) -> dict[str, Any]:
    """Describe tensors that are read where they lie, each by a handle of its own.

    The receiver looks a handle up by its own device. Tensors have to be kept until the answer.

    Args:
        tensors: on one device, contiguous.
        uuids: of the devices; None: asked of torch.

    Raises:
        ValueError: one is not contiguous: a handle would outlive the copy.
    """
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r}: expected a contiguous tensor, for it is read where it lies")
    handles = [{_uuid_of(tensor.device, uuids): handle_of(tensor)[1]} for _, tensor in tensors]
    return {**describe(tensors), "ipc_handles_pickled": dumps(handles, {})}


def cut_packed(tensors: Iterable[Named], chunk_bytes: int) -> Iterator[list[Named]]:
    """Cut a stream of tensors into chunks that fit, and in which each tensor lies where its items can be read.

    Raises:
        ValueError: a tensor is larger than a chunk, or a scalar.
    """
    held: list[Named] = []
    size = 0
    for name, tensor in tensors:
        _refuse_scalar(name, tensor)
        if tensor.nbytes > chunk_bytes:
            raise ValueError(f"{name!r} has {tensor.nbytes} bytes, a chunk {chunk_bytes}")
        if held and (size + tensor.nbytes > chunk_bytes or size % tensor.itemsize):
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


class PackedBuffer:
    """A buffer that chunks are written to one after the other; see the module's invariants.

    Attributes:
        tensor: its bytes.
    """

    def __init__(self, nbytes: int, device: torch.device | Literal["cpu"], uuid: str | None = None) -> None:
        """Allocate and export it.

        Args:
            nbytes: most bytes of a chunk.
            device: where the tensors are.
            uuid: of the device; None: asked of torch.
        """
        import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        uuids = None if uuid is None else {self.tensor.device: uuid}
        self._pickled = dumps({_uuid_of(self.tensor.device, uuids): handle_of(self.tensor)[1]}, {})

    def info(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write a chunk, and describe it; the writes are done when this returns.

        Raises:
            ValueError: it does not fit, or a tensor could not be read where it would lie; nothing was written.
        """
        import torch  # noqa: PLC0415

        starts, at = [], 0
        for name, tensor in tensors:
            _refuse_scalar(name, tensor)
            if at % tensor.itemsize:
                raise ValueError(f"{name!r} of {tensor.dtype} cannot be read at byte {at}: cut with `cut_packed`")
            starts.append(at)
            at += tensor.nbytes
        if at > self.tensor.numel():
            raise ValueError(f"expected at most {self.tensor.numel()} bytes, not {at}")
        with torch.no_grad():
            for start_at, (_, tensor) in zip(starts, tensors, strict=True):
                place = self.tensor[start_at : start_at + tensor.nbytes]
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        return {
            **describe(tensors),
            "tensor_sizes": [math.prod(tensor.shape) * tensor.itemsize for _, tensor in tensors],
            "ipc_handles_pickled": self._pickled,
        }


def _refuse_scalar(name: str, tensor: torch.Tensor) -> None:
    """The engine fails where it gives a packed tensor a shape of no dimensions, and by then it has no weights."""
    if not tensor.dim():
        raise ValueError(f"{name!r} is a scalar, which vLLM cannot take from a packed chunk: send it unpacked")


def _uuid_of(device: torch.device, uuids: Mapping[torch.device, str] | None) -> str:
    import torch  # noqa: PLC0415

    return uuids[device] if uuids is not None else str(torch.cuda.get_device_properties(device).uuid)


def _post(path: str, body: Mapping[str, Any]) -> Call:
    return Call("POST", path, orjson.dumps(body), admin=True)
