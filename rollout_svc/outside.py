"""What a service reaches the world through: sockets, processes, storage, and the randomness of its ids.

Everything else is decided by the code above it; whoever runs a service without sockets, such as a simulator, brings
another `Outside` and changes nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout_svc.buffer.storage import Storage
from rollout_svc.config import Config
from rollout_svc.engines import HttpTransport, Transport
from rollout_svc.judging import ProcessRunner
from rollout_svc.judging.processes import JudgePool
from rollout_svc.launching import Launcher, ProcessLauncher
from rollout_svc.launching.cluster import RayLauncher
from rollout_svc.tensors import Store, Threads, WorkThreads
from rollout_svc.workers.placement import Groups
from rollout_svc.workers.placement_groups import RayGroups

__all__ = ["NewId", "Outside"]

NewId = Callable[[], str]
"""Makes an id that no other has, 32 hexadecimal digits: SGLang aborts by prefix, so wire ids have one width."""

_ID_BYTES: Final = 16  # as unique as a uuid, at a third of its cost
_TOOL_PROCESSES: Final = 4  # at once, for synchronous tools and environments; apart: a hung tool holds up no judge
_TENSOR_THREADS: Final = 2  # one reads while another writes; more would only take the loop's share


def _new_id() -> str:
    return os.urandom(_ID_BYTES).hex()


def _tools() -> ProcessRunner:
    return JudgePool(_TOOL_PROCESSES)


def _launcher(config: Config) -> Launcher:
    return ProcessLauncher() if config.cluster is None else RayLauncher(config)


def _threads() -> Threads:
    return WorkThreads(_TENSOR_THREADS)


@dataclass(frozen=True, slots=True)
class Outside:
    """Makers of the parts that do I/O; called once, in the loop that uses them.

    Attributes:
        transport: carries calls to engines.
        processes: runs synchronous judgers; None: `judges.processes` of them do.
        tools: runs synchronous tools and environments of agent loops.
        launcher: has places for engines that are started, as the configuration says.
        groups: looks up the placement groups of the Ray cluster at an address.
        tensors: makes what keeps heavy tensors; None: as `experts.store` says.
        threads: does what takes long beside the loop.
        storage: makes groups durable; None: the journal at `buffer.path`, or memory, which promises nothing.
        new_id: makes ids of requests, groups and batches.
        wall: wall-clock time, seconds since the epoch, which another life compares with its own.
        probes: whether the memory of this machine's processes is read, in a thread, at each step.
    """

    transport: Callable[[], Transport] = HttpTransport
    processes: Callable[[], ProcessRunner] | None = None
    tools: Callable[[], ProcessRunner] = _tools
    launcher: Callable[[Config], Launcher] = _launcher
    groups: Callable[[str], Groups] = RayGroups
    tensors: Callable[[], Store] | None = None
    threads: Callable[[], Threads] = _threads
    storage: Callable[[], Storage] | None = None
    new_id: NewId = _new_id
    wall: Callable[[], float] = time.time
    probes: bool = True
