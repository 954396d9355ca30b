"""One service, the same settings, deployed in two ways: as a process, and as actors of a cluster.

- Engines are launched by the service in both; on the cluster they are in actors on nodes of their own.
- Each is asked as its trainers ask it: over HTTP, and over Ray.
- CPU is that of the service's own processes, all their threads, and of no engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import orjson

from bench.process import cpu_time_s
from bench.served import Process, settings

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from bench.cluster.nodes import Nodes

__all__ = ["Deployment", "OnRay", "Plain", "canned", "config"]

CALL_TIMEOUT_S = 120.0
_ENGINE_CLASS = "EngineHost"
_COMMAND = ("{python}", "-m", "bench.canned", "--host", "{host}", "--port", "{port}", "--weight-version", "0")


class Deployment(Protocol):
    """What is measured."""

    @property
    def cpu_s(self) -> float:
        """CPU time of the service's processes so far, seconds."""

    def take(self, groups: int) -> int:
        """Take a batch, and acknowledge the one before with it; returns how many groups came."""

    def status(self) -> dict[str, Any]:
        """Ask for the service's status."""

    def pause(self) -> dict[str, Any]:
        """Pause it; returns the report."""

    def resume(self) -> None:
        """Have it go on."""


def canned(*flags: object, on_ray: bool, dialect: str = "sglang") -> dict[str, Any]:
    """Make a worker: an engine process that answers canned bodies; `flags` are further ones of `bench.canned`."""
    launch: dict[str, Any] = {"command": [*_COMMAND, "--dialect", dialect, *map(str, flags)]}
    if on_ray:
        launch["resources"] = {"CPU": 0.1, "seat": 1}
    return {"launch": launch, "dialect": dialect}


def config(
    workers: list[dict[str, Any]],
    in_flight: int,
    max_tokens: int = 256,
    *,
    shards: int = 1,
    journal: Path | None = None,
) -> dict[str, Any]:
    """Make the settings of a service with `in_flight` requests at each of its workers.

    Args:
        workers: as `canned` makes them.
        in_flight: requests under way at each.
        max_tokens: of one answer.
        shards: of the service; more than one want a journal.
        journal: a file for `buffer.path`; None: in memory.
    """
    found = settings(workers, in_flight, max_tokens)
    if any("resources" in worker["launch"] for worker in workers):
        found["cluster"] = {"kind": "ray", "strategy": "spread"}
    if shards > 1:
        found["producer"]["shards"] = shards
    if journal is not None:
        found["buffer"] = {"path": str(journal)}
    return found


class Plain(Process):
    """The service as a process."""

    def take(self, groups: int) -> int:
        """See `Deployment`."""
        self.caller.take(groups)
        return groups

    def status(self) -> dict[str, Any]:
        """See `Deployment`."""
        record: dict[str, Any] = orjson.loads(self.call("GET", "/v1/status"))
        return record

    def pause(self) -> dict[str, Any]:
        """See `Deployment`."""
        report: dict[str, Any] = orjson.loads(self.call("POST", "/v1/pause", {"deadline_s": 30}))
        return report

    def resume(self) -> None:
        """See `Deployment`."""
        self.call("POST", "/v1/resume", {})


class OnRay:
    """The service as actors, for the length of a `with`.

    Args:
        nodes: of the cluster.
        config: its settings.
        name: of its actor.

    Attributes:
        handle: of the service; there once it runs.
        pids: of its processes, with the class of each; there once it runs.
    """

    def __init__(self, nodes: Nodes, config: dict[str, Any], name: str) -> None:
        self._nodes = nodes
        self._config = config
        self._name = name
        self.handle: Any = None
        self.pids: dict[int, str] = {}
        self._unacked: list[str] = []

    def __enter__(self) -> Self:
        import rollout_svc.ray  # noqa: PLC0415 - Ray, only for the cases that have a cluster

        before = self._nodes.actors()
        options: dict[str, Any] = {"resources": {"head": 1}, "num_cpus": 1}
        self.handle = rollout_svc.ray.start(self._config, name=self._name, **options)
        found = self._nodes.actors()
        self.pids = {pid: kind for pid, kind in found.items() if pid not in before and kind != _ENGINE_CLASS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import rollout_svc.ray  # noqa: PLC0415 - as above

        if self.handle is not None:
            rollout_svc.ray.stop(self.handle)

    @property
    def cpu_s(self) -> float:
        """See `Deployment`."""
        return sum(map(cpu_time_s, self.pids))

    def take(self, groups: int) -> int:
        """See `Deployment`."""
        _, batch = self.lease(groups)
        return len(batch["groups"])

    def lease(self, groups: int) -> tuple[Any, Any]:
        """Take a batch, and acknowledge the one before with it; returns Ray's reference to it, and the batch."""
        import ray  # noqa: PLC0415 - as above

        asked = {"step": 0, "groups": groups, "timeout_s": 60.0, "ack": self._unacked}
        reference = self.handle.take_batch.remote(**asked)
        batch = ray.get(reference, timeout=CALL_TIMEOUT_S)
        self._unacked = [batch["batch_id"]]  # it is the same step again and again: no handle knows it for done
        return reference, batch

    def status(self) -> dict[str, Any]:
        """See `Deployment`."""
        record: dict[str, Any] = self._ask("status")
        return record

    def pause(self) -> dict[str, Any]:
        """See `Deployment`."""
        report: dict[str, Any] = self._ask("pause", deadline_s=30.0)
        return report

    def resume(self) -> None:
        """See `Deployment`."""
        self._ask("resume")

    def _ask(self, call: str, **asked: Any) -> Any:
        import ray  # noqa: PLC0415 - as above

        return ray.get(getattr(self.handle, call).remote(**asked), timeout=CALL_TIMEOUT_S)
