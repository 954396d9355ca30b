"""The error tree.

```
RolloutError
├── ConfigError      one or more `Problem`s, each with a dotted path
└── PromptError      a prompt line that cannot become tokens
```
"""

from collections.abc import Iterable
from dataclasses import dataclass


class RolloutError(Exception):
    """Raised when the service cannot do what was asked; the base of every error here."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration, and where."""

    path: str
    """Dotted path of the field (`workers.0.url`), or `file:line:column` for a syntax error."""
    message: str
    """What is wrong, in one line."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(RolloutError):
    """Raised when a configuration cannot be used; it carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, path: str, message: str) -> "ConfigError":
        """Make the error for a single problem."""
        return cls((Problem(path, message),))


class PromptError(RolloutError):
    """Raised when a prompt line cannot become tokens."""
