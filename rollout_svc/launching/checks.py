"""What is wrong with a launch before anything is started: found out without starting it.

Invariant: nothing is made, written or run; a port is only tried.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from rollout_svc.config import Config, LaunchConfig, launch_misfit
from rollout_svc.errors import Problem
from rollout_svc.launching.processes import ProcessLauncher

__all__ = ["address_problems", "launch_problems", "newcomer_problems", "taken_addresses"]


def launch_problems(config: LaunchConfig, where: str) -> list[Problem]:
    """Say what keeps a command from being run, at its place in a configuration; empty where nothing is known to."""
    problems = []
    program = _program_problem(config)
    if program:
        problems.append(Problem(f"{where}.command", program))
    folder = _folder_problem(Path(config.log_folder))
    if folder:
        problems.append(Problem(f"{where}.log_dir", folder))
    return problems


def address_problems(config: LaunchConfig, where: str) -> list[Problem]:
    """Say why an engine could not listen where it is to listen now."""
    try:
        socket.getaddrinfo(config.host, None)
    except OSError as error:
        return [Problem(f"{where}.host", f"{config.host!r} is no address: {error.strerror}")]
    except UnicodeError as error:  # no name can be so long, or have an empty part
        return [Problem(f"{where}.host", f"{config.host!r} is no address: {error}")]
    if not ProcessLauncher.is_free(config.host, 0):
        return [Problem(f"{where}.host", f"{config.host!r} is no address of this machine")]
    if config.port != "auto" and not ProcessLauncher.is_free(config.host, config.port):
        return [Problem(f"{where}.port", f"port {config.port} on {config.host} is in use")]
    return []


def newcomer_problems(config: LaunchConfig, where: str, *, on_cluster: bool) -> list[Problem]:
    """Say what is wrong with an engine that is to be launched while the service runs; takes its time.

    Of what another machine has, on a cluster, nothing is known here: an engine that cannot start there says so itself.
    """
    misfit = launch_misfit(config, on_cluster=on_cluster)
    if misfit is not None:
        return [Problem(f"{where}.{misfit[0]}", misfit[1])]
    return [] if on_cluster else [*launch_problems(config, where), *address_problems(config, where)]


def taken_addresses(config: Config) -> list[Problem]:
    """Say of every configured worker that is launched on this machine why it could not listen now."""
    if config.cluster is not None:
        return []
    launched = ((f"workers.{index}.launch", worker.launch) for index, worker in enumerate(config.workers))
    return [problem for where, launch in launched if launch is not None for problem in address_problems(launch, where)]


def _program_problem(config: LaunchConfig) -> str | None:
    """As the system will look for it: along PATH, unless it is given as a path, which means the working directory."""
    program = config.command_at(None)[0]
    if shutil.which(program, path=config.env.get("PATH")) is not None:
        return None
    if "/" not in program:
        return f"no program {program!r} in PATH"
    path = Path(program)
    if not path.exists():
        return f"no such program: {path.absolute()}"
    return f"is a folder: {path.absolute()}" if path.is_dir() else f"is not executable: {path.absolute()}"


def _folder_problem(folder: Path) -> str | None:
    """Whether the log can be made there, as far as that can be told without making it."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"is no folder: {place}"
    return None if os.access(place, os.W_OK | os.X_OK) else f"cannot be written to: {place}"
