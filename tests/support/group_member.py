"""The ranks of an engine in a trainer's group: real gloo, in threads; each keeps what it received.

Joined as SGLang, LMDeploy and the like do it (`init_custom_process_group`), written down anew: keys below the group's
name, twice, and the device's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["GroupMember"]

TIMEOUT = timedelta(seconds=10)


class GroupMember:
    """Several ranks of one engine.

    Attributes:
        groups: by name, the group of each rank.
        weights: what each rank received last, by name.
        buckets: how many came.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.groups: dict[str, list[Any]] = {}
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.buckets = 0

    async def join(self, info: Mapping[str, Any], name: str, *, warm_up: bool = False) -> None:
        """Join with every rank, at the same time."""
        joined: list[Any] = [None] * self.ranks

        def one(index: int) -> None:
            joined[index] = _join(info, int(info["rank_offset"]) + index, name)
            if warm_up:
                import torch

                joined[index].allreduce([torch.zeros(1)]).wait()

        await self._in_threads(one)
        self.groups[name] = joined

    async def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, flat: bool
    ) -> None:
        """Receive a bucket, by every rank; raises whatever goes wrong."""
        await self._in_threads(lambda index: self._receive(index, name, list(zip(names, dtypes, shapes)), flat=flat))  # noqa: B905
        self.buckets += 1

    def leave(self, name: str) -> bool:
        """Leave; False where it was in no such group."""
        return self.groups.pop(name, None) is not None

    def _receive(self, index: int, name: str, wanted: list[Any], *, flat: bool) -> None:
        import torch

        empty = [(key, torch.empty(tuple(shape), dtype=getattr(torch, dtype))) for key, dtype, shape in wanted]
        group = self.groups[name][index]
        if not flat:
            for _, tensor in empty:
                _broadcast(group, tensor)
            self.weights[index].update(empty)
            return
        buffer = torch.empty(sum(tensor.nbytes for _, tensor in empty), dtype=torch.uint8)
        _broadcast(group, buffer)
        at = 0
        for key, tensor in empty:
            part = buffer[at : at + math.prod(tensor.shape) * tensor.itemsize]
            self.weights[index][key] = part.view(tensor.dtype).view(tensor.shape).clone()
            at += part.numel()

    async def _in_threads(self, work: Callable[[int], None]) -> None:
        loop, errors = asyncio.get_running_loop(), []
        done = asyncio.Event()
        left = list(range(self.ranks))

        def tell() -> None:
            left.pop()
            if not left:
                done.set()

        def run(index: int) -> None:
            try:
                work(index)
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)
            loop.call_soon_threadsafe(tell)

        for index in range(self.ranks):
            Thread(target=run, args=(index,), daemon=True).start()
        await done.wait()
        if errors:
            raise errors[0]


def _join(info: Mapping[str, Any], rank: int, name: str) -> Any:
    from torch import distributed

    c10d: Any = distributed
    host, port, size = info["master_address"], info["master_port"], info["world_size"]
    store = c10d.TCPStore(host, port, size, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    for prefix in (name, f"{name}/", "cpu/"):
        store = c10d.PrefixStore(prefix, store)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    from torch import distributed

    c10d: Any = distributed
    options = c10d.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = TIMEOUT
    if tensor.numel():
        group.broadcast([tensor], options).wait()
