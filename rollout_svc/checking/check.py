"""A whole check: the plugin is made, tried, and reported on.

Invariants:

- One event loop of its own for all of it, so it is called where none runs.
- What it started has ended when it returns: processes, threads, the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rollout_svc.checking import places
from rollout_svc.checking.agents import RULES as AGENT_RULES
from rollout_svc.checking.agents import AgentCheck
from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.findings import Report
from rollout_svc.checking.judgers import RULES as JUDGER_RULES
from rollout_svc.checking.judgers import JudgerCheck
from rollout_svc.checking.processes import Processes
from rollout_svc.checking.stand import Inline
from rollout_svc.checking.stepping import Runaway, watched
from rollout_svc.checking.subject import made, options_of, prompt_line, spec_of
from rollout_svc.checking.tongue import Tongue
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.judging.making import parts_of
from rollout_svc.prompt import Prompt
from rollout_svc.tokens import TextCodec

__all__ = ["DEFAULT_TURNS", "check_agent", "check_judger"]

_TIMES: Final = 3  # that what is left is cancelled: clean-up may swallow one
_CLINGING_S: Final = 1.0  # of the loop's time, after each

DEFAULT_TURNS: Final = ("The answer is 4.", "It is 4, as I said.", "4")
"""What the model says, turn by turn, where nothing else is asked for."""


def check_agent(
    target: str, *, options: Sequence[str] = (), prompt: Path | None = None, turns: Sequence[str] = ()
) -> Report:
    """Try an agent loop.

    Args:
        target: `module:attr`, or the name of one that is installed.
        options: `key=value` for it.
        prompt: a file, whose first line is the prompt.
        turns: what the model says, turn by turn.

    Raises:
        ConfigError: it cannot be made.
    """
    spec = spec_of(target, options_of(options), "agents")
    agent = made(spec, "agent")
    if getattr(agent, "needs_http", False):
        raise ConfigError.at("agent", "its turns come over HTTP, from a client that only a running service has")
    report = Report("agent", target, AGENT_RULES)

    async def run(processes: Processes) -> None:
        read = await _prompt(prompt_line(prompt))
        check = AgentCheck(agent, report, read, turns or DEFAULT_TURNS, processes)
        if check.look():
            await check.run()

    _run(run, report)
    return report


def check_judger(
    target: str,
    *,
    options: Sequence[str] = (),
    prompt: Path | None = None,
    responses: Sequence[str] = (),
    timeout_s: float = 10.0,
    deterministic: bool = False,
) -> Report:
    """Try a judger.

    Args:
        target: `module:attr`, or the name of one that is installed.
        options: `key=value` for it.
        prompt: a file, whose first line is the prompt.
        responses: answers to judge; none: the ground truth, and a wrong one.
        timeout_s: of one verdict.
        deterministic: the same answer has to be worth the same each time.

    Raises:
        ConfigError: it cannot be made.
    """
    spec = spec_of(target, options_of(options), "judgers")
    judger = made(spec, "judger")
    parts = parts_of(judger, timeout_s, "judger")
    report = Report("judger", target, JUDGER_RULES)

    async def run(processes: Processes) -> None:
        read = await _prompt(prompt_line(prompt))
        check = JudgerCheck(
            judger,
            spec,
            report,
            read,
            responses,
            processes,
            timeout_s=timeout_s,
            deterministic=deterministic,
            parts=parts,
        )
        if check.look():
            await check.run()

    _run(run, report)
    return report


def _run(work: Callable[[Processes], Awaitable[None]], report: Report) -> None:
    """Run a check in a loop of its own, watched."""
    with asyncio.Runner(loop_factory=CheckLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CheckLoop)  # noqa: S101 - made above
        loop.set_exception_handler(lambda *_: None)  # what it leaves behind is told in the report
        processes = Processes(loop)

        async def whole() -> None:
            try:
                await work(processes)
            finally:
                await processes.close()
                report.clinging += await _let_go(loop)

        def held(seconds: float, where: str) -> None:
            report.add("holds_loop", "ran it", f"it held the event loop for {seconds:.1f} s", where)

        with watched(loop, held):
            try:
                runner.run(whole())
            except SystemExit as error:  # of a task that it began
                report.add("raises", "ran it", f"a task of it called exit({error})", places.of_error(error))
            except Runaway:
                pass  # what held the loop is told by who watched it


async def _let_go(loop: CheckLoop) -> list[asyncio.Task[Any]]:
    """Return the tasks that no cancellation ends, which are in the report: the runner would wait for them for ever."""
    left = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for _ in range(_TIMES):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=_CLINGING_S)
    for task in left:
        asyncio._unregister_task(task)  # noqa: SLF001 - documented, for whoever looks after tasks himself
    return [*left]


async def _prompt(line: dict[str, Any]) -> Prompt:
    """Make the prompt, its text in the tongue of the check."""
    try:
        ids = await TextCodec(Tongue(), Inline()).encode_prompt(line)
    except SampleFailure as failure:
        raise ConfigError.at("--prompt", failure.message) from failure
    return Prompt(
        prompt_id=str(line.get("id", "check")),
        task="check",
        input_ids=ids,
        content=line.get("messages") or line.get("text"),
        ground_truth=line.get("ground_truth"),
        meta=dict(line.get("meta") or {}),
    )
