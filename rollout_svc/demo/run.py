"""A whole run: files, processes, loop and report, in order, and everything ended at the end.

Invariants:

- Whatever happens, no process started here is left, and the exit code says how it went: 0 learned, 1 failed or did
  not learn, 2 nothing was started because the options cannot be used.
- What was seen before a failure is still written.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING

from rollout_svc.demo.files import RunFiles
from rollout_svc.demo.live import make_view
from rollout_svc.demo.processes import Children
from rollout_svc.demo.records import History
from rollout_svc.demo.report import write_picture, write_summary
from rollout_svc.errors import Problem, RolloutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout_svc.demo.grpo import GrpoTrainer
    from rollout_svc.demo.live import View
    from rollout_svc.demo.options import DemoOptions
    from rollout_svc.demo.stage import OpenStage

__all__ = ["run_demo"]

DONE, FAILED, USAGE = 0, 1, 2


def run_demo(options: DemoOptions) -> int:
    """Run the whole loop, on this machine or with service and engines on a Ray cluster.

    Args:
        options: What is asked for.

    Returns:
        The exit code: 0 the policy learned, 1 it did not, or something failed, 2 bad options.
    """
    problems = [str(problem) for problem in options.problems() or _cluster_problems(options)]
    files = RunFiles(options.out)
    if not problems:
        try:
            files.prepare(options)
        except OSError as error:
            problems.append(f"--out: cannot write to {options.out}: {error.strerror or error}")
    if problems:
        sys.stderr.write("\n".join(problems) + "\n")
        return USAGE
    history = History(options.task.chance_reward)
    with _interruptible():
        try:
            with make_view(json=options.json) as view:
                return _run(options, files, history, view)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: everything that was started has ended\n")
        except (RolloutError, OSError) as error:
            sys.stderr.write(f"the demo failed: {error}\n")
    if history.records:
        write_summary(history, options.out)
    return FAILED


def _run(options: DemoOptions, files: RunFiles, history: History, view: View) -> int:
    view.note("loading torch")
    from rollout_svc.demo.loop import DemoLoop  # noqa: PLC0415  loads torch, which takes seconds

    trainer = _trainer(options)
    with Children(files.logs) as children:
        try:
            with _opener(options)(options, files, trainer, children, view) as stage:
                DemoLoop(stage, trainer, options, files, history, view, children.check).run()
                view.note("stopping the service and the engines")
        except RolloutError:
            children.check()  # a child that died is the better explanation
            raise
    written = [write_summary(history, options.out), write_picture(history, options.out)]
    view.finish(history, written)
    return DONE if history.has_learned else FAILED


def _cluster_problems(options: DemoOptions) -> list[Problem]:
    if options.cluster is None:
        return []
    from rollout_svc.demo.cluster import cluster_problems  # noqa: PLC0415

    return cluster_problems(options)


def _opener(options: DemoOptions) -> OpenStage:
    """Choose where service and engines run."""
    if options.cluster is None:
        from rollout_svc.demo.machine import machine_stage  # noqa: PLC0415

        return machine_stage
    from rollout_svc.demo.cluster import cluster_stage  # noqa: PLC0415

    return cluster_stage


def _trainer(options: DemoOptions) -> GrpoTrainer:
    import torch  # noqa: PLC0415

    from rollout_svc.demo.grpo import GrpoOptions, GrpoTrainer  # noqa: PLC0415
    from rollout_svc.demo.task import VOCABULARY  # noqa: PLC0415
    from rollout_svc.embedded.model import build, preset  # noqa: PLC0415

    torch.set_num_threads(1)
    model = build(preset(options.model, vocab_size=len(VOCABULARY), context=options.task.context), options.seed)
    return GrpoTrainer(model, GrpoOptions(lr=options.lr))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGINT and SIGTERM end the run cleanly, SIGINT also where a shell has it ignored for background jobs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
