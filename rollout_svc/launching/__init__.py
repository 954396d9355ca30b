"""Starting engines: on leashes, with logs, and again when they end.

What is decided (`policy`, `ports`) is apart from what is done (`processes`, `leash`).
"""

from rollout_svc.launching.checks import launch_problems, newcomer_problems, taken_addresses
from rollout_svc.launching.launch import Launch, Launcher, LaunchFailed, Process, Seat, how_it_ended
from rollout_svc.launching.leash import leashed
from rollout_svc.launching.policy import Restarts
from rollout_svc.launching.ports import choose_port
from rollout_svc.launching.processes import ProcessLauncher, tail

__all__ = [
    "Launch",
    "LaunchFailed",
    "Launcher",
    "Process",
    "ProcessLauncher",
    "Restarts",
    "Seat",
    "choose_port",
    "how_it_ended",
    "launch_problems",
    "leashed",
    "newcomer_problems",
    "tail",
    "taken_addresses",
]
