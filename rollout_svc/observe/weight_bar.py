"""A bar on a terminal while new weights are on their way.

Invariants:

- It is there from the first word of an update to its end, and leaves nothing behind: the log says how it ended.
- What is logged meanwhile stands above it.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rollout_svc import events

__all__ = ["show_weights"]


def show_weights(bus: events.EventBus, console: Console) -> None:
    """Show every update of a bus there."""
    bar = _Bar(console)
    bus.subscribe(events.WeightsProgress, bar.moved)
    bus.subscribe(events.WeightUpdateEnded, bar.ended)


class _Bar:
    """The bar of one update at a time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def moved(self, event: events.WeightsProgress) -> None:
        """Draw it, for the first time or anew."""
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._progress = Progress(
                *columns, TimeElapsedColumn(), console=self._console, transient=True, redirect_stdout=False
            )
            self._task = self._progress.add_task("", total=None)
            self._progress.start()
        told = f"weights {event.version} by {event.kind}: {event.phase or 'next'}, {event.buckets} buckets"
        self._progress.update(self._task, description=told, completed=event.bytes, total=event.total_bytes)

    def ended(self, _: events.WeightUpdateEnded) -> None:
        """Take it away."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
