"""`rollout-svc check agent` and `check judger`.

Invariants:

- Exit codes: 0 nothing was found, 1 something was, 2 it cannot be used at all.
- Nothing of the check is imported before it is asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import orjson
import typer

if TYPE_CHECKING:
    from rollout_svc.checking.findings import Report

__all__ = ["app"]

_FOUND: Final = 1

app = typer.Typer(help="Try an agent loop or a judger of your own, and say what it does wrong.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(help="module:attr, or an installed name.", metavar="MODULE:ATTR")]
Options = Annotated[list[str] | None, typer.Option("--option", help="key=value for it, JSON; repeatable.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt", help="A prompt line, JSON; default: a sum.")]
Json = Annotated[bool, typer.Option("--json", help="Answer as one JSON object.")]


@app.command()
def agent(
    target: Target,
    option: Options = None,
    prompt: PromptFile = None,
    turn: Annotated[list[str] | None, typer.Option(help="What the model says, turn by turn; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Run an agent loop against a scripted engine: pauses, cancellation and failures at every await."""
    from rollout_svc.checking.check import check_agent  # noqa: PLC0415 - the parts are needed only here

    _end(check_agent(target, options=option or (), prompt=prompt, turns=turn or ()), as_json=as_json)


@app.command()
def judger(
    target: Target,
    option: Options = None,
    prompt: PromptFile = None,
    response: Annotated[list[str] | None, typer.Option(help="An answer to judge; repeatable.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one verdict.", min=0.1, max=600)] = 10.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same answer is worth the same.")] = False,
    as_json: Json = False,
) -> None:
    """Run a judger as the service does: in a process, in the loop, cancelled, with groups of 1, 2 and 8."""
    from rollout_svc.checking.check import check_judger  # noqa: PLC0415 - as above

    report = check_judger(
        target,
        options=option or (),
        prompt=prompt,
        responses=response or (),
        timeout_s=timeout_s,
        deterministic=deterministic,
    )
    _end(report, as_json=as_json)


def _end(report: Report, *, as_json: bool) -> None:
    record = report.as_json()
    if as_json:
        typer.echo(orjson.dumps(record))
    else:
        from rollout_svc.checking.table import show_check  # noqa: PLC0415 - rich

        show_check(record)
    code = 0 if record["ok"] else _FOUND
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if report.clinging or any(not thread.daemon for thread in threads):
        sys.stdout.flush()
        os._exit(code)  # what of the plugin's does not end would be waited for
    raise typer.Exit(code)
