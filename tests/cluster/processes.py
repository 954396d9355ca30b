"""The processes of actors: which they are, what they hold, and their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

__all__ = ["actor_pid", "held_by", "host_pid", "kill", "lives", "shard_pids"]


def _actors(**wanted: str) -> list[Any]:
    from ray.util.state import list_actors

    alive = [actor for actor in list_actors(detail=True, limit=1000) if actor.state == "ALIVE"]
    return [actor for actor in alive if all(getattr(actor, key) == value for key, value in wanted.items())]


def actor_pid(name: str) -> int:
    """The process of a service's actor."""
    [actor] = _actors(name=name)
    return int(actor.pid or 0)


def shard_pids() -> list[int]:
    """The processes of all shards."""
    return [int(actor.pid or 0) for actor in _actors(class_name="ShardActor")]


def host_pid(engine_pid: int) -> int:
    """The process of the actor that has an engine on its leash: the nearest of its ancestors that is one."""
    hosts = {int(actor.pid or 0) for actor in _actors(class_name="EngineHost")}
    command = f"/proc/{engine_pid}/stat"
    while True:
        parent = int(Path(command).read_text().rpartition(")")[2].split()[1])
        if parent in hosts:
            return parent
        assert parent > 1, f"{engine_pid} is no child of {hosts}"
        command = f"/proc/{parent}/stat"


def kill(pid: int) -> None:
    """End a process as a crash does."""
    os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def held_by(pid: int) -> tuple[float, int, int]:
    """Resident MB, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir()))
