"""Which of the prompts are one shard's: those whose place in the epoch's order is its own, counted round.

Invariant: over all shards every place is somebody's, and nobody else's.
"""

from dataclasses import dataclass

__all__ = ["WHOLE", "Portion"]


@dataclass(frozen=True, slots=True)
class Portion:
    """The places `index`, `index + of`, and so on."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"there is no portion {self.index} of {self.of}")

    def __str__(self) -> str:
        return f"{self.index} of {self.of}"

    def has(self, place: int) -> bool:
        """Whether a place is in it."""
        return place % self.of == self.index

    def count(self, places: int) -> int:
        """How many of the first `places` are in it."""
        return max(0, -(-(places - self.index) // self.of))

    def after(self, used: int) -> int:
        """The first place, of all, that is not behind once `used` of its own are used up."""
        return (used - 1) * self.of + self.index + 1 if used else 0


WHOLE = Portion(0, 1)
"""All places: of a service that is no shard."""
