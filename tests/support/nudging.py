"""An environment that asks twice whether the model is sure."""

from typing import Any

__all__ = ["Nudging"]


class Nudging:
    """Lives in the loop."""

    async def reset(self, sample: Any) -> None:
        """Begin with the prompt's own messages."""
        self.asked = 0

    async def step(self, said: dict[str, Any]) -> dict[str, Any]:
        """Ask, or be content."""
        self.asked += 1
        if self.asked > 2:
            return {"done": True, "reward": 1.0}
        return {"messages": [{"role": "user", "content": "Are you sure?"}]}
