"""Every token an engine of a history ever made: which request it was made for, at which place, by which weights.

Invariant: a token's id is unique in its history, so whoever holds an id can be asked where it has it from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.simulation.engine import Request

__all__ = ["FIRST_MADE", "Tokens"]

FIRST_MADE: Final = 1000
"""Ids below this are prompts' and tools'."""


class Tokens:
    """The register of tokens."""

    def __init__(self) -> None:
        self.made: list[tuple[Request, int, int]] = []

    def make(self, request: Request, weights: int) -> int:
        """Make the next token of a request; returns its id."""
        self.made.append((request, len(request.tokens), weights))
        return FIRST_MADE + len(self.made) - 1

    def problem(self, prompt: list[int], response: list[int]) -> str | None:
        """What is wrong with a response: every token has to stand where it was made for; None when all do."""
        expected: tuple[Request, int] | None = None
        for place, token in enumerate(response):
            if token < FIRST_MADE:
                expected = None
                continue
            if token >= FIRST_MADE + len(self.made):
                return f"token {token} at {place} was made by nobody"
            request, index, _ = self.made[token - FIRST_MADE]
            if expected == (request, index):
                expected = (request, index + 1)
                continue
            if index != 0:
                return f"token {token} at {place} is the {index}th of {request.rid}, what was before it is missing"
            if request.input_ids != prompt + response[:place]:
                return f"token {token} at {place}: {request.rid} was asked to go on from something else"
            expected = (request, 1)
        return None

    def weights(self, token: int) -> int | None:
        """The weights that made a token; None for one that no engine made."""
        return self.made[token - FIRST_MADE][2] if token >= FIRST_MADE else None
