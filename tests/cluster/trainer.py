"""A trainer in a process of its own."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Trainer"]


class Trainer:
    """Takes batches of a service that it finds by name; to be made an actor."""

    def __init__(self, name: str) -> None:
        import rollout_svc.ray

        self._rollout = rollout_svc.ray.connect(name)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def take(self, groups: int) -> list[str]:
        """Take a batch, and keep it; returns the ids of its groups."""
        import ray

        batch = ray.get(self._rollout.take_batch.remote(0, groups, 30.0))
        return [group["group_id"] for group in batch["groups"]]

    def ask(self, name: str, **how: Any) -> Any:
        """Call the service."""
        import ray

        return ray.get(getattr(self._rollout, name).remote(**how))
