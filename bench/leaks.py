"""How soon the watch on memory names a leak, how often it is wrong, and what a step costs; and the picture of one.

`python -m bench.leaks [--seeds 300] [--plot docs/memory.svg]`. Nothing is measured but the watch itself: the accounts
are drawn from seeds, with noise, and a leak of 1 % a step is planted at step 40.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.report import Point, print_report, progress
from rollout_svc.observe.memory import MemoryWatch

WINDOW: Final = 20
START: Final = 40
"""The step at which the leak begins."""
FLAT_STEPS: Final = 1000
STEP_S: Final = 1e-3
"""What a step may cost the event loop, in seconds."""
_NOISES: Final = (0.005, 0.01, 0.02)
_BOUNDS: Final = {0.005: 1.0, 0.01: 1.0, 0.02: None}  # beyond 1 % of noise a window cannot be sure
_STEPS: Final = 90  # of the picture
_COLOURS: Final = {
    "rss": "#22303c",
    "python_heap": "#1f6fb4",
    "handles.experts": "#d9822b",
    "replay_buffer": "#0f766e",
    "journal_disk": "#8a97a3",
}
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "memory",
    "font.size": 9,
    "font.family": "sans-serif",
}


def steps_until_named(noise: float, seeds: int) -> int:
    """The steps that the slowest of so many leaks took to be named; a hundred windows where one was not."""
    rng = np.random.default_rng(1)
    count = START + 5 * WINDOW
    leak = 1e8 * (1 + 0.01 * np.clip(np.arange(count) - START, 0, None))
    values = leak[:, None] + 1e8 * noise * rng.standard_normal((count, seeds))
    watch = MemoryWatch(window_steps=WINDOW)
    named: dict[str, int] = {}
    for step, row in enumerate(values):
        news = watch.record(step, "service", {f"handles.{seed}": round(value) for seed, value in enumerate(row)})
        for growth in news.growing:
            named.setdefault(growth.account, step - START)
    return 100 * WINDOW if len(named) < seeds else max(named.values())


def false_alarms(noise: float, seeds: int) -> int:
    """Warnings in 1,000 steps of so many accounts that are flat but for noise."""
    values = 1e8 * (1 + noise * np.random.default_rng(2).standard_normal((FLAT_STEPS, seeds)))
    watch = MemoryWatch(window_steps=WINDOW)
    records = ({f"handles.{seed}": round(value) for seed, value in enumerate(row)} for row in values)
    return sum(len(watch.record(step, "service", record).growing) for step, record in enumerate(records))


def cost_s() -> float:
    """Seconds of a step with 16 accounts, at the median."""
    watch, rng = MemoryWatch(window_steps=WINDOW), np.random.default_rng(3)
    costs = []
    for step in range(500):
        record = {f"handles.{place}": int(value) for place, value in enumerate(rng.integers(10**8, 10**9, 16))}
        started = time.perf_counter()
        watch.record(step, "service", record)
        costs.append(time.perf_counter() - started)
    return float(np.median(costs[WINDOW:]))


def history() -> list[dict[str, int]]:
    """A run as it might be: a warm-up, a buffer that fills, a saw-tooth on the disk, and from step 40 on a leak."""
    rng = np.random.default_rng(4)
    rows = []
    for step in range(_STEPS):
        leaked = 6e6 * max(0, step - START)
        buffer = 1.5e8 * min(1.0, max(0.0, (step - 18) / 5)) * (1 + 0.02 * rng.standard_normal())
        experts = 1.2e8 * (1 + 0.02 * rng.standard_normal()) + leaked
        heap = 2.5e8 + 1.2e8 * (1 - np.exp(-step / 3)) + buffer + experts
        rss = heap * 1.05 + 3e8 + 6e6 * rng.standard_normal()
        journal = 4e7 + 1.2e8 * (step % 13) / 13
        names = ("rss", "python_heap", "handles.experts", "replay_buffer", "journal_disk")
        rows.append(
            {name: int(value) for name, value in zip(names, (rss, heap, experts, buffer, journal), strict=True)}
        )
    return rows


def plot(path: Path) -> None:
    """Draw the history, with what the watch said of it and when."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second, for the picture only
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows, watch = history(), MemoryWatch(window_steps=WINDOW)
    told = [(step, growth) for step, row in enumerate(rows) for growth in watch.record(step, "service", row).growing]
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for name, colour in _COLOURS.items():
            values = [row[name] / 1e6 for row in rows]
            axes.plot(values, color=colour, linewidth=2.4 if name == "handles.experts" else 1.3)
            lift = {"replay_buffer": 4, "journal_disk": -10}.get(name, -3)
            axes.annotate(name, (_STEPS - 1, values[-1]), (6, lift), textcoords="offset points", color=colour)
        axes.axvspan(START, _STEPS - 1, color="#d9822b", alpha=0.07, linewidth=0)
        axes.annotate("a leak begins", (START, 210), (-4, 0), textcoords="offset points", ha="right", color="#8a4b00")
        for step, growth in told:
            words = "again: it\nhas doubled"
            if not growth.again:
                words = f"step {step}: {growth.account} grows\nby {growth.bytes_per_step / 1e6:.1f} MB a step, "
                words += f"{growth.of_rss or 0:.0%} of the growth of rss"
            axes.axvline(step, color="#b42318", linewidth=1, linestyle="--")
            axes.annotate(
                words, (step, 1400), (-4, 0), textcoords="offset points", ha="right", color="#b42318", fontsize=8.5
            )
        axes.set_xlim(0, _STEPS + 13)
        axes.set_ylim(0, 1550)
        axes.set_xlabel("trainer step")
        axes.set_ylabel("MB")
        axes.spines[["top", "right"]].set_visible(False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<!--.*?-->\s*", "", drawn.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    path.write_text(re.sub(r" ?\n *", "\n", svg), encoding="utf-8")


def main() -> None:
    """Run, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="leaks, and flat accounts, of each kind")
    parser.add_argument("--plot", type=Path, help="draw the picture of a leak, and nothing else")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        plot(arguments.plot)
        return
    points = []
    for noise in _NOISES:
        steps = steps_until_named(noise, arguments.seeds)
        points.append(Point(f"named-{noise:.1%}", steps, WINDOW, _BOUNDS[noise]))
        alarms = false_alarms(noise, arguments.seeds)
        points.append(Point(f"false-{noise:.1%}", alarms, FLAT_STEPS * arguments.seeds, 0.0))
        progress(f"noise {noise:.1%}: the slowest leak named after {steps} steps, {alarms} false alarms")
    points.append(Point("step", cost_s(), STEP_S, 1.0))
    print_report("leaks", points)


if __name__ == "__main__":
    main()
