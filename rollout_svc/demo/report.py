"""What a run leaves behind: `summary.json` and `reward.png`.

Invariants:

- Each file is whole or absent: it is written beside its place and renamed.
- The picture is drawn without a display, whatever backend the environment asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from rollout_svc.demo.records import PASS_SHARE
from rollout_svc.demo.task import MAX_REWARD

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from rollout_svc.demo.records import History, StepRecord

__all__ = ["PICTURE", "SUMMARY", "write_picture", "write_summary"]

SUMMARY: Final = "summary.json"
PICTURE: Final = "reward.png"
SMOOTHED: Final = 9
"""Steps in the running mean of the drawn curve."""
_INK, _BLUE, _ORANGE, _GREY = "#22303c", "#1f6fb4", "#d9822b", "#8a97a3"


def write_summary(history: History, directory: Path) -> Path:
    """Write `summary.json`; returns its path."""
    partial, path = directory / f".{SUMMARY}.partial", directory / SUMMARY
    partial.write_bytes(orjson.dumps(history.summary(), option=orjson.OPT_INDENT_2))
    return partial.replace(path)


def write_picture(history: History, directory: Path) -> Path:
    """Write `reward.png`, reward above and pause time below, over the steps; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  half a second, once, at the end
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 6.2), dpi=140, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1.2]})
    _draw_reward(above, history)
    _draw_pauses(below, history.records)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.grid(axis="y", color="#e6eaee", linewidth=0.8)
        axes.set_axisbelow(True)
    partial, path = directory / f".{PICTURE}.partial", directory / PICTURE
    canvas.print_figure(partial, format="png")
    return partial.replace(path)


def _draw_reward(axes: Axes, history: History) -> None:
    steps = [record.step for record in history.records]
    rewards = [record.reward for record in history.records]
    axes.plot(steps, rewards, color=_BLUE, alpha=0.3, linewidth=1, label="reward of a step")
    axes.plot(steps, running_mean(rewards), color=_BLUE, linewidth=2.2, label=f"mean of {SMOOTHED} steps")
    lines = (
        (MAX_REWARD, "attainable", _INK, "-"),
        (PASS_SHARE * MAX_REWARD, "learned", _GREY, ":"),
        (history.chance_reward, "guessing", _ORANGE, "--"),
    )
    for value, name, colour, style in lines:
        axes.axhline(value, color=colour, linewidth=1.2, linestyle=style, label=f"{name}, {value:.3g}")
    axes.set_ylim(-0.02, MAX_REWARD * 1.06)
    axes.set_ylabel("reward", color=_INK)
    title = f"A policy that learns: reward {history.first_reward:.2f} → {history.last_reward:.2f}"
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.05), frameon=False, fontsize=8.5, labelcolor=_INK)


def _draw_pauses(axes: Axes, records: list[StepRecord]) -> None:
    steps = [record.step for record in records]
    axes.bar(steps, [record.pause_s * 1000 for record in records], width=1.0, color=_BLUE, alpha=0.75)
    axes.set_ylabel("pause, ms", color=_INK)
    axes.set_xlabel("trainer step", color=_INK)
    aborted = sum(record.aborted for record in records)
    continued = sum(record.continued for record in records)
    title = f"generation paused for new weights; {aborted} samples cut off, {continued} of them continued"
    axes.set_title(title, loc="left", color=_INK, fontsize=9)


def running_mean(values: list[float]) -> list[float]:
    """Return the mean around each value: `SMOOTHED` of them, fewer at both ends."""
    reach = SMOOTHED // 2
    parts = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def as_json(history: History) -> str:
    """Return the summary as one JSON document."""
    return orjson.dumps(history.summary(), option=orjson.OPT_INDENT_2).decode()
