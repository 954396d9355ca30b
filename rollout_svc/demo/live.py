"""What a run shows while it goes: a live view on a terminal, plain lines elsewhere.

Invariants:

- A view only reads; what it shows is in the history.
- With `json`, standard output gets the summary and nothing else; progress goes to standard error.
- Plain output is one line per event: nothing to redraw, good for a log.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollout_svc.demo.report import as_json
from rollout_svc.demo.task import MAX_REWARD

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from rollout_svc.demo.records import Answer, History

__all__ = ["LiveView", "PlainView", "View", "make_view"]

REFRESH_PER_S: Final = 4
"""Redraws of the live view; more would take processor time from the trainer."""
PLAIN_EVERY_S: Final = 5.0
"""Between two lines of plain progress."""
CURVE_WIDTH: Final = 60
"""Characters of the reward curve."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_ACCOUNTS: Final = ("queued", "in_flight", "aborted", "ready", "leased", "consumed", "expired", "failed")


class View(Protocol):
    """What the loop tells whoever watches."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """Say one thing."""

    def step(self, history: History) -> None:
        """Show the run after a step."""

    def answers(self, title: str, answers: list[Answer]) -> None:
        """Show what the policy answers to a few prompts."""

    def finish(self, history: History, written: list[Path]) -> None:
        """Show how it ended."""


def make_view(*, json: bool) -> View:
    """Choose the view for this standard output."""
    if json:
        return PlainView(sys.stderr, summary=sys.stdout)
    if sys.stdout.isatty():
        return LiveView(Console(file=sys.stdout))  # whatever standard output becomes meanwhile
    return PlainView(sys.stdout)


class PlainView:
    """Lines."""

    def __init__(self, progress: TextIO, summary: TextIO | None = None) -> None:
        self._progress = progress
        self._summary = summary
        self._next_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def note(self, text: str) -> None:
        """Write a line."""
        self._progress.write(text + "\n")
        self._progress.flush()

    def step(self, history: History) -> None:
        """Write a line now and then."""
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + PLAIN_EVERY_S
        record = history.records[-1]
        self.note(
            f"step {record.step:4d}  reward {history.last_reward:.3f}  {history.tokens_per_s:6.0f} tokens/s  "
            f"in flight {record.in_flight:3d}  pause {record.pause_s * 1000:4.0f} ms  "
            f"aborted {record.aborted:3d}  continued {record.continued:3d}  "
            f"consumed {record.ledger.get('consumed', 0)}"
        )

    def answers(self, title: str, answers: list[Answer]) -> None:
        """Write a line per answer."""
        self.note(f"{title}:")
        for answer in answers:
            self.note(f"  {answer.prompt}{answer.answer:<18} wanted {answer.target}  reward {answer.reward:.2f}")

    def finish(self, history: History, written: list[Path]) -> None:
        """Write the outcome, and the summary where it is wanted."""
        self.note(_outcome(history))
        self.note(memory_line(history))
        self.note("wrote " + ", ".join(str(path) for path in written))
        if self._summary is not None:
            self._summary.write(as_json(history) + "\n")
            self._summary.flush()


class LiveView:
    """A panel that is redrawn in place; what is said stays above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(text, style="dim", highlight=False, markup=False)

    def step(self, history: History) -> None:
        """Redraw the panel."""
        self._live.update(panel(history))

    def answers(self, title: str, answers: list[Answer]) -> None:
        """Print a table above the panel."""
        self._console.print(answers_table(title, answers))

    def finish(self, history: History, written: list[Path]) -> None:
        """Print the outcome."""
        self._live.stop()
        colour = "green" if history.has_learned else "red"
        self._console.print(Text(_outcome(history), style=f"bold {colour}"))
        self._console.print(memory_line(history), highlight=False, markup=False)
        self._console.print("wrote " + ", ".join(str(path) for path in written), highlight=False, markup=False)


def panel(history: History) -> Panel:
    """Draw the run as it stands: curve, figures, ledger."""
    record = history.records[-1]
    figures = Table.grid(padding=(0, 3))
    for _ in range(4):
        figures.add_column()
    figures.add_row(
        _figure("step", str(record.step)),
        _figure("reward", f"{history.last_reward:.3f}"),
        _figure("tokens/s", f"{history.tokens_per_s:,.0f}"),
        _figure("in flight", str(record.in_flight)),
    )
    figures.add_row(
        _figure("pause", f"{record.pause_s * 1000:.0f} ms"),
        _figure("aborted", str(sum(one.aborted for one in history.records))),
        _figure("continued", str(sum(one.continued for one in history.records))),
        _figure("weights", str(record.weight_version)),
    )
    ledger = "  ".join(f"{name} {record.ledger.get(name, 0)}" for name in _ACCOUNTS)
    body = Group(
        Text(curve([one.reward for one in history.records]), style="cyan"),
        Text(f"0 to {MAX_REWARD:g}; guessing gets {history.chance_reward:.3f}", style="dim"),
        figures,
        Text(f"ledger (samples)  {ledger}", style="dim"),
    )
    return Panel(body, title="rollout demo", title_align="left", border_style="blue")


def curve(rewards: list[float]) -> str:
    """Draw rewards as a line of bars, the whole run squeezed into `CURVE_WIDTH`."""
    width = min(CURVE_WIDTH, len(rewards))
    bars = []
    for column in range(width):
        part = rewards[column * len(rewards) // width : (column + 1) * len(rewards) // width]
        height = sum(part) / len(part) / MAX_REWARD
        bars.append(_BARS[min(len(_BARS) - 1, max(0, round(height * (len(_BARS) - 1))))])
    return "".join(bars)


def answers_table(title: str, answers: list[Answer]) -> Table:
    """Draw what the policy answers."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for column in ("prompt", "answer", "wanted", "reward"):
        table.add_column(column, style="dim" if column == "wanted" else "")
    for one in answers:
        style = "green" if one.reward == MAX_REWARD else "yellow"
        table.add_row(Text(one.prompt), Text(one.answer, style=style), Text(one.target), f"{one.reward:.2f}")
    return table


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _outcome(history: History) -> str:
    verdict = "learned" if history.has_learned else "did not learn"
    return (
        f"The policy {verdict} the task: reward {history.first_reward:.3f} at the start, {history.last_reward:.3f} at "
        f"the end of {len(history.records)} steps (guessing {history.chance_reward:.3f}, attainable {MAX_REWARD:g})."
    )


def memory_line(history: History) -> str:
    """Say what became of the service's memory."""
    memory = history.memory
    if memory.get("rss_bytes") is None:
        return "Memory was not measured."
    line = f"Memory: {memory['verdict']}; the service was at {memory['first_rss_bytes'] / 1e6:.1f} MB at the first step"
    line += f", {memory['rss_bytes'] / 1e6:.1f} MB at the end"
    slope = memory["rss_bytes_per_step"]
    return line + ("." if slope is None else f", {slope / 1e3:+.1f} KB a step over the last ones.")
