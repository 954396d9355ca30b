"""An environment for `multi_turn`: the model guesses a number, and is told whether it is higher or lower."""

import re
from typing import Any


class Guessing:
    """Made once for each sample; not async, so it lives in a process apart, and is a pickle between two steps."""

    def __init__(self, *, highest: int = 100) -> None:
        self.highest = highest
        self.number = 0

    def reset(self, sample: Any) -> list[dict[str, str]]:
        """Begin: what the model is told first; None would be the prompt as it is."""
        self.number = int(sample.ground_truth)
        return [{"role": "user", "content": f"Guess my number, from 1 to {self.highest}."}]

    def step(self, said: dict[str, Any]) -> dict[str, Any]:
        """Answer what the model said; rewards of steps are added up."""
        guesses = re.findall(r"\d+", said["content"] or "")
        if not guesses:
            return {"messages": [{"role": "user", "content": "A number, please."}], "reward": -0.1}
        guess = int(guesses[-1])
        if guess == self.number:
            return {"reward": 1.0, "done": True}
        return {"messages": [{"role": "user", "content": "Higher." if guess < self.number else "Lower."}]}
