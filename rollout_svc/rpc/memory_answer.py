"""The record of `GET /v1/memory`, as `/openapi.json` describes it."""

from __future__ import annotations

from rollout_svc.rpc.answers import GrowthRecord, Natural, Record

__all__ = ["MemoryRecord"]


class MemoryAccount(Record):
    """One account of a process."""

    bytes: Natural
    first_bytes: Natural
    """At the first step that was seen."""
    bytes_per_step: int | None
    """Over the last window of steps; null: too early to say."""


class MemoryProcess(Record):
    """One process."""

    name: str
    """`service`, `engine <worker>` for each engine it launched, `children` for whatever else it started."""
    pid: Natural | None
    """Null: there are several, or none now."""
    accounts: dict[str, MemoryAccount]


class MemoryHandles(Record):
    """Tensors of one kind that are alive."""

    handles: Natural
    bytes: Natural


class MemoryHolder(Record):
    """One tensor that is alive, and who has it."""

    kind: str
    bytes: Natural
    holder: str


class MemorySystem(Record):
    """What the processes run on."""

    rollout_svc: str | None
    python: str
    torch: str | None
    """The version installed, and whether it is loaded; null: it is not installed."""
    ray: str | None
    numpy: str | None
    libc: str
    allocator: str
    settings: dict[str, str]
    """Variables of the environment that change how memory is kept, those that are set."""
    cpus: Natural
    memory_bytes: Natural | None
    memory_limit_bytes: Natural | None
    """What the container may have; null: no limit was found."""


class MemoryRecord(Record):
    """What every process has, what grows with the trainer's steps, and what is to blame."""

    verdict: str
    """One line for people."""
    growing: list[GrowthRecord]
    step: int | None
    """The last of the trainer's steps that was seen; null: none was."""
    steps: Natural
    """How many were."""
    window_steps: Natural
    processes: list[MemoryProcess]
    handles: dict[str, MemoryHandles]
    lost: dict[str, Natural]
    """Tensors whose owner forgot them, by kind, since the start."""
    holders: list[MemoryHolder] | None
    """Oldest first; null: `memory.debug` is off."""
    holders_omitted: Natural
    system: MemorySystem
    trouble: str | None
    """Why something could not be read."""
