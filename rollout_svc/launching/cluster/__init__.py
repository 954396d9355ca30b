"""Engines on a Ray cluster: each in an actor of its own, on a bundle of a placement group.

`placing` decides who gets which bundle, `host` is the actor, and `launcher` has them made and reached.
"""

from rollout_svc.launching.cluster.launcher import RayLauncher

__all__ = ["RayLauncher"]
