"""What the demo's loop asks of a service, however it is reached: over HTTP, or over Ray.

Invariant: there is one loop; who opens a stage for it has started the service, and ends it with the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from rollout_svc.demo.files import RunFiles
    from rollout_svc.demo.grpo import GrpoTrainer
    from rollout_svc.demo.live import View
    from rollout_svc.demo.options import DemoOptions
    from rollout_svc.demo.processes import Children

__all__ = ["ENGINES", "START_TIMEOUT_S", "OpenStage", "Stage", "engine_arguments"]

ENGINES: Final = 2
"""Built-in engines of the fleet."""
START_TIMEOUT_S: Final = 90.0
"""For engines, then for the service: importing torch takes seconds, more on a busy machine."""


class Stage(Protocol):
    """The calls of `SyncRolloutClient` that the loop makes; each raises RolloutError where it fails."""

    def take_batch(self, step: int, groups: int, timeout_s: float, *, tensors: bool = False) -> dict[str, Any]:
        """Take a batch, which acknowledges the one before."""

    def pause(self, *, deadline_s: float) -> dict[str, Any]:
        """Stop generation; returns the report."""

    def update_weights(self, version: int, source: Mapping[str, Any]) -> dict[str, Any]:
        """Have every engine load new weights."""

    def resume(self, ticket: int, *, weight_version: int) -> dict[str, Any]:
        """Go on, if every engine reports that version."""

    def ack(self, batch_id: str) -> dict[str, Any]:
        """Acknowledge a batch."""

    def status(self) -> dict[str, Any]:
        """Tell what the service is doing."""

    def memory(self) -> dict[str, Any]:
        """Tell what the service has in memory."""


class OpenStage(Protocol):
    """Starts engines and a service for a run, and ends what it started that is none of the children."""

    def __call__(
        self, options: DemoOptions, files: RunFiles, trainer: GrpoTrainer, children: Children, view: View
    ) -> AbstractContextManager[Stage]:
        """Open it."""


def engine_arguments(options: DemoOptions, files: RunFiles, index: int) -> list[str]:
    """Make the arguments of the engine with that index, but for where it listens."""
    return [
        *("engine", "--model", options.model, "--seed", str(options.seed * ENGINES + index)),
        *("--tokenizer", str(files.tokenizer.resolve()), "--context", str(options.task.context)),
        *("--weights", str(files.first_weights.resolve())),
    ]
