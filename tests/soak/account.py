"""What a soak has seen: what each process held at every step, and whether that is as it should be.

Invariants:
- A thing that does not hold is said once, with the first step at which it did not.
- Handles are counted by the service itself, memory by the kernel.
"""

from __future__ import annotations

import re
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from tests.soak.slope import SPREAD, slope_of

BOOK_TIMEOUT_S: Final = 5.0
"""For a line of the book: it is written before the pause is answered."""
BOOK_POLL_S: Final = 0.002
TASKS: Final = 8
"""Of the service's event loop, that there may be more at the end of the window."""
IN_USE: Final = 2**18
"""Bytes that may be in use more at the end of the window: what the last thousand batches were is remembered."""
BLOCKS: Final = 2_500
"""Python's blocks that there may be more: about five a step; a sample left behind at every step is dozens of them."""
ENGINE: Final = 2**20
"""Bytes that an engine may grow by: half of what another process may, for it has two threads."""
MIN_STEPS: Final = 8
"""Steps without which there is no slope."""


class Sight(NamedTuple):
    """What was held at the end of one step.

    Attributes:
        held: the service's line of its book.
        engines: resident bytes of each engine.
        trainer: resident bytes of the trainer.
        trained: bytes in use in the trainer.
    """

    held: dict[str, Any]
    engines: tuple[int, ...]
    trainer: int
    trained: int


class Book:
    """The book that the service keeps, read by another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._lines: dict[int | None, dict[str, Any]] = {}

    def of(self, ticket: int) -> dict[str, Any]:
        """The line of a pause.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + BOOK_TIMEOUT_S
        while ticket not in self._lines:
            self._more()
            if ticket not in self._lines:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the service has written nothing of pause {ticket}")
                time.sleep(BOOK_POLL_S)
        return self._lines.pop(ticket)

    def last(self) -> dict[str, Any] | None:
        """What was left when the service had stopped; None: it has not said."""
        self._more()
        return self._lines.get(None)

    def _more(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                read = orjson.loads(line)
                self._lines[read["ticket"]] = read


@dataclass(slots=True)
class Account:
    """The run so far."""

    broken: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    _sights: list[Sight] = field(default_factory=list)
    _seen: int = 0
    _most: int = 0

    def break_(self, what: str) -> None:
        """Say what does not hold; only the first of a kind is kept."""
        self.broken.setdefault(re.sub(r"\d+", "#", what), f"{what} (after {self._seen} steps and pauses)")

    def add(self, sight: Sight) -> None:
        """Look at one step."""
        self._seen += 1
        held = sight.held
        self._sights.append(sight)
        self._most = max(self._most, held["live"])
        if held["live"] != held["reachable"]:
            self.break_(f"live handles are not the reachable ones: {held['live']} of which {held['reachable']}")
        if held["lost"]:
            self.break_(f"handles were forgotten: {held['lost']}")

    def latest(self) -> str:
        """The last step, for a line of progress."""
        held, engines, trainer, _ = self._sights[-1]
        sizes = " ".join(_mb(size) for size in engines)
        handles = f"handles {held['live']}={held['reachable']} of {held['made']}, lost {held['lost']}"
        return f"MB: service {_mb(held['rss'])} engines {sizes} trainer {_mb(trainer)}  {handles}"

    def close(self, what: str) -> None:
        """Judge the memory of a part of the run, and begin the next."""
        sights, self._sights = self._sights, []
        if len(sights) < MIN_STEPS:
            return
        self._judge(what, "service", [sight.held["rss"] for sight in sights], SPREAD)
        self._judge(what, "service, in use", [sight.held["bytes"] for sight in sights], IN_USE)
        for index in range(len(sights[0].engines)):
            self._judge(what, f"engine-{index}", [sight.engines[index] for sight in sights], ENGINE)
        self._judge(what, "trainer, in use", [sight.trained for sight in sights], IN_USE)
        blocks = slope_of([sight.held["blocks"] for sight in sights], spread=BLOCKS)
        if not blocks.flat:
            self.break_(f"Python's blocks in the service grow in {what}: {blocks.value:.1f} a step")
        tasks = slope_of([sight.held["tasks"] for sight in sights], spread=TASKS)
        if not tasks.flat:
            self.break_(f"tasks of the service grow in {what}: {tasks.value:.2f} a step")
        if not self._most:
            self.break_("no step had a handle")

    def _judge(self, what: str, process: str, series: list[int], spread: float) -> None:
        found = slope_of(series, spread)
        verdict = "flat" if found.flat else "GROWS"
        self.rows.append(
            (
                what,
                process,
                str(len(series)),
                _mb(series[0]),
                _mb(series[-1]),
                f"{found.value:.0f}",
                f"{found.sigma / 1024:.0f}",
                f"{found.bound:.0f}",
                verdict,
            )
        )
        if not found.flat:
            self.break_(f"{process} grows in {what} by {found.value:.0f} bytes a step, {found.bound:.0f} are noise")

    def stopped(self, last: dict[str, Any] | None) -> None:
        """Look at what was left when the service had stopped."""
        if last is None:
            self.break_("the service did not stop by itself")
        elif last["live"] or last["lost"]:
            self.break_(f"after the end {last['live']} handles are alive, and {last['lost']} were forgotten")

    def table(self) -> str:
        """The whole run, for people."""
        head = ("of", "process", "steps", "MB first", "last", "bytes/step", "noise KB", "bound", "")
        lines = [head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        drawn = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        verdict = [f"BROKEN: {what}" for what in self.broken.values()] or [
            "nothing grew, and every handle had its owner"
        ]
        return "\n".join(["", *drawn, "", f"most handles alive at a step: {self._most}", *verdict])


def resident_of(pid: int) -> int:
    """Memory of a process that is in RAM, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"
