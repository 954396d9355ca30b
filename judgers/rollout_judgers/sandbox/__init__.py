"""Running programs nobody trusts: walled off, limited, and gone afterwards."""

from rollout_judgers.sandbox.limits import Limits
from rollout_judgers.sandbox.run import Ran, Sandbox, SandboxError
from rollout_judgers.sandbox.walls import Walls, choose

__all__ = ["Limits", "Ran", "Sandbox", "SandboxError", "Walls", "choose"]
