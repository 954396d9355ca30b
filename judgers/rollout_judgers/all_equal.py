"""`all_equal`: drop a group whose answers are all worth the same; they say nothing about which is better."""

from __future__ import annotations

from rollout_svc.filtering import GroupView

__all__ = ["AllEqual"]


class AllEqual:
    """Drop a group if its rewards differ by no more than `tolerance`.

    Args:
        tolerance: the largest difference that counts as none.
    """

    inline = True  # it compares, and nothing else

    def __init__(self, *, tolerance: float = 0.0) -> None:
        if not tolerance >= 0:
            raise ValueError(f"tolerance is {tolerance}, not a number from 0 on")
        self.tolerance = tolerance

    def keep(self, group: GroupView) -> str | None:
        """Return `all_equal`, or None to keep the group; a single answer equals itself."""
        rewards = group.rewards
        return "all_equal" if max(rewards) - min(rewards) <= self.tolerance else None
