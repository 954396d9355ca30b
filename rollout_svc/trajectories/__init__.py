"""Trajectories: every finished group as a line of JSON in a file, for people and their tools."""

from rollout_svc.trajectories.checks import trajectory_problems
from rollout_svc.trajectories.files import LineFile
from rollout_svc.trajectories.writer import Trajectories

__all__ = ["LineFile", "Trajectories", "trajectory_problems"]
