"""What a run of the demo is asked for.

Invariants:

- Any values can be held; `problems` says which cannot be used, by the name of their flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollout_svc.demo.task import SortTask
from rollout_svc.errors import Problem

__all__ = ["CLUSTERS", "MODELS", "MOE", "DemoOptions"]

CLUSTERS: Final = ("ray",)
"""Kinds of clusters that a run can be on."""
MOE: Final = "tiny-moe"
"""The model with experts."""
MODELS: Final = ("tiny", MOE)
"""Presets of the built-in engine that the demo runs."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Settings of one run.

    Attributes:
        steps: Most trainer steps; the run ends earlier once the policy has learned.
        seed: Seed of the weights, the prompts and the engines' draws.
        lr: Learning rate; 0 trains nothing, and shows what a policy that guesses gets.
        out: Directory for everything the run writes.
        json: Write the summary as JSON to standard output, and nothing else there.
        task: The size of the task.
        model: Name of the policy's preset. With experts, the routing that engines report is replayed in training.
        cluster: Kind of the cluster that service and engines run on; None: they are processes on this machine.
        address: Of the cluster to join; None: one of its own is started.
    """

    steps: int = 400
    seed: int = 0
    lr: float = 1e-3
    out: Path = field(default_factory=lambda: Path("demo-out"))
    json: bool = False
    task: SortTask = field(default_factory=SortTask)
    model: str = "tiny"
    cluster: str | None = None
    address: str | None = None

    @property
    def has_experts(self) -> bool:
        """Whether the policy is a mixture of experts."""
        return self.model == MOE

    def problems(self) -> list[Problem]:
        """Return what is wrong with the values; empty where they can be used."""
        found = []
        if self.steps < 1:
            found.append(Problem("--steps", f"at least 1, got {self.steps}"))
        if self.seed < 0:
            found.append(Problem("--seed", f"at least 0, got {self.seed}"))
        if not (math.isfinite(self.lr) and self.lr >= 0):
            found.append(Problem("--lr", f"a finite number of at least 0, got {self.lr}"))
        if self.model not in MODELS:
            found.append(Problem("--model", f"one of {', '.join(MODELS)}, got {self.model}"))
        if self.cluster is not None and self.cluster not in CLUSTERS:
            found.append(Problem("--cluster", f"one of {', '.join(CLUSTERS)}, got {self.cluster}"))
        if self.address is not None and self.cluster is None:
            found.append(Problem("--address", "is of a cluster: give --cluster ray as well"))
        return found
