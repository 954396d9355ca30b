"""The process behind a worker that is launched, as the worker knows it.

Invariant: written by its keeper (`launching.py`), but for `answered`, which the supervisor hears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Launched"]


@dataclass(slots=True)
class Launched:
    """The process behind a worker that is launched.

    Attributes:
        log: the file with all it said, on the machine it runs on; empty where none is known yet.
        pid: its number; None while none runs.
        starts: how often one was started.
        answered: whether the one that was started last has said what it is.
        over: it ended, and none is started any more.
        last_words: the end of the log, where the last one ended before it answered.
    """

    log: str
    pid: int | None = None
    starts: int = 0
    answered: bool = False
    over: bool = False
    last_words: str = ""

    @property
    def where(self) -> str:
        """Where to read on, for the end of a sentence; empty where there is no log yet."""
        return f" (log: {self.log})" if self.log else ""

    def as_json(self) -> dict[str, Any]:
        """Return the record of `process` in `status.workers`."""
        return {"pid": self.pid, "starts": self.starts, "log": self.log}

    def began(self, pid: int) -> None:
        """A process was started."""
        self.pid, self.answered, self.last_words = pid, False, ""
        self.starts += 1
