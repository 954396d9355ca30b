"""What torch and Ray have, where this process uses them.

Invariants:

- Neither is imported here: who has not imported torch has no tensors, who has not connected to Ray has no objects.
- Called in a thread. A call is bounded: a scan by its share of the time, a question to Ray by a timeout.
- What cannot be read is left out; what other projects keep private may look otherwise tomorrow.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["RayBytes", "TorchBytes"]

_SLICE: Final = 5000  # objects looked at before other threads get their turn
_SHARE: Final = 0.02  # of the time that looking for tensors may take
_RAY_TIMEOUT_S: Final = 2.0  # for an answer of this node's raylet: milliseconds
_RAY_EVERY_S: Final = 5.0  # between two questions
_SPILLED: Final = "ray_spilled_objects*"  # folders of this node's session


class TorchBytes:
    """Counts the bytes of tensors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, look: bool = True) -> None:
        """Begin.

        Args:
            clock: seconds.
            look: whether tensors on the CPU are looked for, for torch does not count them. A list of all objects keeps
                each of them while it is looked through: what is released meanwhile, a tensor or the statements of a
                database that is being closed, goes a moment later.
        """
        self._clock = clock
        self._look = look
        self._next = 0.0
        self._cpu = 0

    def read(self) -> dict[str, int]:
        """`torch_cpu`, the storages of tensors that Python can reach, and `torch_cuda`, what its allocator gave out.

        Tensors are looked for again only once that has cost no more than a fiftieth of the time.
        """
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):  # or is being imported just now
            return {}
        found: dict[str, int] = {}
        if self._look:
            started = self._clock()
            if started >= self._next:
                self._cpu = _tensors(torch)
                now = self._clock()
                self._next = now + (now - started) / _SHARE
            found["torch_cpu"] = self._cpu
        if torch.cuda.is_initialized():
            found["torch_cuda"] = sum(
                torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())
            )
        return found


def _tensors(torch: Any) -> int:
    storages: dict[int, int] = {}
    objects = gc.get_objects()
    for start in range(0, len(objects), _SLICE):
        for found in objects[start : start + _SLICE]:
            if issubclass(type(found), torch.Tensor):
                try:
                    if found.device.type == "cpu":
                        storage = found.untyped_storage()
                        storages[storage.data_ptr()] = storage.nbytes()
                except (RuntimeError, NotImplementedError):  # one that has no storage
                    continue
        time.sleep(0)
    return sum(storages.values())


class RayBytes:
    """Asks this node's raylet what the object stores have, and the disk what was spilled."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.trouble = ""
        """Why Ray could not be asked; it is not asked again."""
        self._clock = clock
        self._next = 0.0
        self._found: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """`ray_store` and `ray_spilled`: bytes in the cluster's stores, and on this node's disk."""
        ray = sys.modules.get("ray")
        if ray is None or self.trouble or not hasattr(ray, "is_initialized") or not ray.is_initialized():
            return {}
        if self._clock() >= self._next:
            try:
                self._found = _asked(ray)
            except Exception as error:  # noqa: BLE001 - anything may be wrong with what is not ours, and nothing of it matters
                self.trouble = f"{type(error).__name__}: {error}"
                return {}
            self._next = self._clock() + _RAY_EVERY_S
        return self._found


def _asked(ray: Any) -> dict[str, int]:
    inner: Any = importlib.import_module("ray._private.internal_api")
    worker: Any = importlib.import_module("ray._private.worker")
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)
    reply = inner.get_memory_info_reply(
        None, node["NodeManagerAddress"], node["NodeManagerPort"], timeout_seconds=_RAY_TIMEOUT_S
    )
    session = Path(worker._global_node.get_session_dir_path())  # noqa: SLF001 - Ray has no public word for it
    spilled = sum(path.stat().st_size for folder in session.glob(_SPILLED) for path in folder.iterdir())
    return {"ray_store": int(reply.store_stats.object_store_bytes_used), "ray_spilled": spilled}
