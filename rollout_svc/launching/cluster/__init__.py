"""Engines on a Ray cluster: each in an actor of its own, on a bundle of a placement group.

`placing` decides who gets which bundle, `host` is the actor with an engine's process, `keeper` the one with the groups,
and `launcher` has them made and reached.
"""

from rollout_svc.launching.cluster.launcher import RayLauncher
from rollout_svc.launching.cluster.reaching import cluster_problems

__all__ = ["RayLauncher", "cluster_problems"]
