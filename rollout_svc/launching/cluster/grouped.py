"""Run an engine's command inside a placement group that somebody else owns.

    python -m rollout_svc.launching.cluster.grouped GROUP BUNDLE COMMAND ARGUMENT...

An engine that makes workers of its own on Ray finds the group it is to use by asking Ray which one it is in, and only
an actor is in one: a process of its own is a driver, and would make a group of its own. So this process, on the
engine's leash, has an actor on that bundle run the command, where the command is Python's.

Invariants:

- The actor ends with this process, and whatever it made on Ray with it; this process ends as the command did.
- What the command says goes where this process says things: both are on one node.
- A command that is not Python's takes this process's place, and is in no group.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["Inside", "grouped", "python_of"]

_LINE_BYTES: Final = 256  # of a script's first line
_OWN: Final = ("CUDA_VISIBLE_DEVICES", "RAY_")  # variables that Ray gives each process itself


def grouped(python: str, group: str, bundle: int, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs `command` on a bundle of a group, by its id."""
    return (python, "-m", "rollout_svc.launching.cluster.grouped", group, str(bundle), *command)


def python_of(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return what Python is to run: `-m MODULE` or a script's path, then arguments; None where it is not Python's."""
    program = shutil.which(command[0])
    if program is None:
        return None
    if Path(program).name.startswith("python"):
        runs = len(command) > 1 and (command[1] == "-m" or not command[1].startswith("-"))
        return tuple(command[1:]) if runs else None
    with open(program, "rb") as file:  # noqa: PTH123 - reads a line of what may be large
        first = file.readline(_LINE_BYTES)
    return (program, *command[1:]) if first.startswith(b"#!") and b"python" in first else None


class Inside:
    """The actor that is on the bundle."""

    def run(self, command: Sequence[str], env: Mapping[str, str], said: str, folder: str) -> int:
        """Run Python's part of a command to its end; returns its exit code."""
        log = os.open(said, os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ.update({name: value for name, value in env.items() if not name.startswith(_OWN)})
        os.chdir(folder)
        try:
            if command[0] == "-m":
                sys.argv = list(command[1:])
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(command)
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def _main(group: str, bundle: str, *command: str) -> None:
    python = python_of(command)
    if python is None:
        sys.stderr.write(f"{command[0]} is not Python's: it is run beside the placement group, not in it\n")
        sys.stderr.flush()
        os.execvp(command[0], command)  # noqa: S606 - the operator's own command
    import ray  # noqa: PLC0415 - a second to import
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    from rollout_svc.launching.cluster.groups import group_called  # noqa: PLC0415

    ray.init(log_to_driver=False, configure_logging=False)  # at RAY_ADDRESS
    where = PlacementGroupSchedulingStrategy(group_called(group), int(bundle), placement_group_capture_child_tasks=True)
    inside: Any = ray.remote(Inside)
    actor = inside.options(num_cpus=0, num_gpus=0, scheduling_strategy=where).remote()
    said = str(Path("/proc/self/fd/1").resolve())
    ran = actor.run.remote(python, dict(os.environ), said, str(Path.cwd()))
    sys.exit(ray.get(ran))  # as long as the engine runs: this process is its, and whoever waits for it ends both


if __name__ == "__main__":
    _main(*sys.argv[1:])
