"""The stage of a run on this machine: engines and service are processes of its own, reached over HTTP."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rollout_svc.demo.processes import READY_POLL_S, Child, ChildFailed, Children
from rollout_svc.demo.stage import ENGINES, START_TIMEOUT_S, Stage, engine_arguments
from rollout_svc.rpc.blocking import SyncRolloutClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout_svc.demo.files import RunFiles
    from rollout_svc.demo.grpo import GrpoTrainer
    from rollout_svc.demo.live import View
    from rollout_svc.demo.options import DemoOptions

__all__ = ["machine_stage"]


@contextlib.contextmanager
def machine_stage(
    options: DemoOptions, files: RunFiles, trainer: GrpoTrainer, children: Children, view: View
) -> Iterator[Stage]:
    """Start engines and service, and wait until they have found each other."""
    service = _start(options, files, trainer, children, view)
    with SyncRolloutClient(service.url) as client:
        _wait_running(client, children)
        yield client


def _start(options: DemoOptions, files: RunFiles, trainer: GrpoTrainer, children: Children, view: View) -> Child:
    """Start the engines, then the service that uses them; returns the service."""
    files.save_first_weights(trainer.model)
    view.note(f"starting {ENGINES} engines and the service; their logs are in {files.logs}")
    engines = [
        children.start(
            f"engine-{index}",
            "engine",
            "rollout_svc",
            [*engine_arguments(options, files, index), "--port", "0"],
        )
        for index in range(ENGINES)
    ]
    children.wait_ready(engines, START_TIMEOUT_S, view.note)
    files.write_config(options, [{"url": engine.url, "dialect": "sglang"} for engine in engines])
    service = children.start("service", "service", "rollout_svc", ["serve", "--config", str(files.config)])
    children.wait_ready([service], START_TIMEOUT_S, view.note)
    return service


def _wait_running(client: SyncRolloutClient, children: Children) -> None:
    """Wait until the service has reached its engines."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not client.ready():
        children.check()
        if time.monotonic() >= deadline:
            raise ChildFailed(f"the service has not reached its engines after {START_TIMEOUT_S:g} s")
        time.sleep(READY_POLL_S)
