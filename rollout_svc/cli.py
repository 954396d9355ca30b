"""The command line: `rollout-svc` and `python -m rollout_svc`.

Invariants:

- Exit codes: 0 done; 1 it ran and failed; 2 bad usage or bad configuration, one line per problem on stderr.
- What a command answers goes to stdout, everything else to stderr.
- torch and ray are imported by the command that needs them, not by this module.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from rollout_svc.checking.command import app as check_app
from rollout_svc.config import Config
from rollout_svc.configfile import dump_config, load_config, load_trainer
from rollout_svc.errors import BadRequest, ConfigError, RolloutError
from rollout_svc.plan import Plan, make_plan

__all__ = ["app", "main"]

_FAILED: Final = 1
_BAD_USAGE: Final = 2

app = typer.Typer(
    help="The rollout stage of an asynchronous LLM-RL loop, as a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(check_app, name="check")

Json = Annotated[bool, typer.Option("--json", help="Answer as one JSON object.")]
Url = Annotated[str, typer.Option(help="Address of the service.", envvar="ROLLOUT_SVC_URL")]
Token = Annotated[str | None, typer.Option(help="Bearer token of the service.", envvar="ROLLOUT_SVC_TOKEN")]
_URL: Final = "http://127.0.0.1:8700"


def main() -> None:
    """Run the command line; every expected error is a line on stderr and an exit code."""
    try:
        app()
    except (ConfigError, BadRequest) as error:  # what was typed is refused, here or by the service
        sys.stderr.write(f"{error}\n")
        sys.exit(_BAD_USAGE)
    except RolloutError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(_FAILED)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Most trainer steps.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and draws.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Learning rate; 0 learns nothing.")] = None,
    out: Annotated[Path, typer.Option(help="Where summary.json and reward.png go.")] = Path("demo-out"),
    model: Annotated[str, typer.Option(help="Policy: tiny, or tiny-moe, whose routing is replayed.")] = "tiny",
    cluster: Annotated[str | None, typer.Option(help="ray: service and engines on a Ray cluster.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="With --cluster: one to join, HOST:PORT or auto; default: RAY_ADDRESS, or its own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the whole loop: engines, service, and a trainer that learns; on this machine, or with --cluster on Ray."""
    from rollout_svc.demo import DemoOptions, run_demo  # noqa: PLC0415 - torch, which no other command needs

    given: dict[str, Any] = {"seed": seed, "out": out, "json": as_json, "model": model, "cluster": cluster}
    given["address"] = address or (os.environ.get("RAY_ADDRESS") if cluster else None) or None
    given |= {key: value for key, value in (("steps", steps), ("lr", lr)) if value is not None}
    raise typer.Exit(run_demo(DemoOptions(**given)))


@app.command()
def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override: a.b=c; repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and the plan; offline.")] = False,
    preflight: Annotated[bool, typer.Option("--preflight", help="Ask every engine what it is; start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --preflight: answer as one JSON object.")] = False,
    restore: Annotated[Path | None, typer.Option(help="Go on from a snapshot; buffer.path is not there yet.")] = None,
    restore_step: Annotated[
        int | None, typer.Option(min=0, help="With --restore: trainer steps done; default: the snapshot's.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the service."""
    _check_usage(
        ("--preflight", dry_run and preflight, "it reaches the engines, and --dry-run is offline: give one of the two"),
        ("--json", as_json and not preflight, "is for --preflight"),
        ("--restore-step", restore_step is not None and restore is None, "is for --restore"),
        ("--restore", restore is not None and dry_run, "makes a journal, and --dry-run starts nothing: give one"),
        ("--restore", restore is not None and preflight, "makes a journal, and --preflight starts nothing: give one"),
    )
    settings = load_config(config, overrides or ())
    # A console script does not search the folder it is called from; `module:attr` is meant as `python -m` finds it.
    sys.path[:0] = [str(Path.cwd()), str(config.resolve().parent)]
    from rollout_svc.assembly import prepare  # noqa: PLC0415 - the parts are needed only here
    from rollout_svc.observe.logs import LEVELS, configure_logs  # noqa: PLC0415
    from rollout_svc.recovery import Restore  # noqa: PLC0415
    from rollout_svc.serve import serve as run  # noqa: PLC0415
    from rollout_svc.sharding.outlook import shard_outlook  # noqa: PLC0415

    level = next((level for level in LEVELS if level == log_level), None)
    if level is None:
        raise ConfigError.at("--log-level", f"{log_level!r} is none of {', '.join(LEVELS)}")
    if dry_run:
        plan = prepare(settings).plan
        _show_dry_run(settings, plan, shard_outlook(settings, plan))
        return
    if preflight:
        plan = prepare(settings).plan
        raise typer.Exit(_preflight(settings, plan, shard_outlook(settings, plan), as_json=as_json))
    configure_logs(level)
    raise typer.Exit(run(settings, level, None if restore is None else Restore(restore, restore_step)))


def _check_usage(*rules: tuple[str, bool, str]) -> None:
    """Refuse the first option that is given where it has no use: its name, whether it is, and why."""
    for option, useless, message in rules:
        if useless:
            raise ConfigError.at(option, message)


def _preflight(config: Config, plan: Plan, shards: list[dict[str, Any]], *, as_json: bool) -> int:
    """Ask the engines, and show what they answered, which shard each belongs to, and what would fail."""
    import asyncio  # noqa: PLC0415 - a quarter of what `--help` costs

    from rollout_svc.asking import preflight  # noqa: PLC0415
    from rollout_svc.observe.preflight_table import show_preflight  # noqa: PLC0415 - rich

    report = asyncio.run(preflight(config, plan)) | {"shards": shards}
    _answer(report, as_json=as_json, show=show_preflight)
    return 0 if report["ok"] else _FAILED


def _show_dry_run(config: Config, plan: Plan, shards: list[dict[str, Any]]) -> None:
    from rollout_svc.observe.preflight_table import shard_lines  # noqa: PLC0415 - rich
    from rollout_svc.producer.schedule import first_window  # noqa: PLC0415 - as above
    from rollout_svc.workers.placement import remarks  # noqa: PLC0415 - as above

    typer.echo(dump_config(config).rstrip())
    typer.echo("\n# concurrency plan")
    _show_plan(plan)
    for remark in remarks(config.workers):
        typer.echo(f"warning:     {remark}")
    typer.echo("\n# schedule, at the start")
    for key, value in first_window(config, plan).items():
        typer.echo(f"{key + ':':12} {value}")
    if shards:
        typer.echo("\n# shards")
        for line in shard_lines(shards):
            typer.echo(line)


@app.command()
def engine(  # noqa: PLR0917 - options, not positions
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 takes a free one.", min=0, max=65535)] = 30000,
    model: Annotated[str, typer.Option(help="Preset: tiny, tiny-moe, wide (1 GiB of weights).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the first weights.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with tokenizer.json; default: bytes.")] = None,
    context: Annotated[int | None, typer.Option(help="Most tokens of a sequence.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests decoded together.")] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors to start with.")] = None,
    script: Annotated[Path | None, typer.Option(help="What to say to which prompts: JSON rules, for tests.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the data routes.")] = None,
    admin_api_key: Annotated[str | None, typer.Option(help="Key of the control routes.")] = None,
    die_with_parent: Annotated[bool, typer.Option("--die-with-parent", help="End when the parent does.")] = False,
    experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts/--no-enable-return-routed-experts",
            help="Tell routed experts to who asks, where the model has some.",
        ),
    ] = True,
) -> None:
    """Run the built-in engine alone: SGLang's dialect, a tiny torch model.

    --script FILE makes it say what you want where a prompt fits, through the same sampling: one JSON object a line, as
    {"match": {"ends_with": "2 + 2 = "}, "say": "4", "peak": 0.99}. Conditions: contains, ends_with, regex, ids_end.
    {"turn": "<|assistant|>"} tells where the model begins to speak; with it, "say" may list one text a turn.
    """
    from rollout_svc.embedded.run import run_engine  # noqa: PLC0415 - torch

    given: dict[str, Any] = {} if max_running is None else {"max_running": max_running}
    raise typer.Exit(
        run_engine(
            host=host,
            port=port,
            model=model,
            seed=seed,
            tokenizer=tokenizer,
            context=context,
            weights=weights,
            script=script,
            api_key=api_key,
            admin_api_key=admin_api_key,
            die_with_parent=die_with_parent,
            return_routed_experts=experts,
            **given,
        )
    )


@app.command()
def status(url: Url = _URL, token: Token = None, as_json: Json = False) -> None:
    """Show what the service is doing."""
    from rollout_svc.observe.terminal import show_status  # noqa: PLC0415 - rich

    answer = _ask(url, token, lambda client: client.status())
    _answer(answer, as_json=as_json, show=show_status)


@app.command()
def stuck(
    url: Url = _URL,
    token: Token = None,
    older_than: Annotated[float | None, typer.Option(help="Seconds under way; default: what a pause may take.")] = None,
    as_json: Json = False,
) -> None:
    """Show who is stuck: since when, and where."""
    from rollout_svc.observe.terminal import show_stuck  # noqa: PLC0415 - rich

    if older_than is not None and not (math.isfinite(older_than) and older_than >= 0):
        raise ConfigError.at("--older-than", f"expected a finite number, 0 or greater, not {older_than}")
    answer = _ask(url, token, lambda client: client.stuck(older_than))
    _answer(answer, as_json=as_json, show=show_stuck)


@app.command()
def memory(url: Url = _URL, token: Token = None, as_json: Json = False) -> None:
    """Show what every process has, what grows with the steps, and what is to blame."""
    from rollout_svc.observe.memory.table import show_memory  # noqa: PLC0415 - numpy, with its package

    answer = _ask(url, token, lambda client: client.memory())
    _answer(answer, as_json=as_json, show=show_memory)


@app.command()
def pause(
    url: Url = _URL,
    token: Token = None,
    deadline_s: Annotated[float | None, typer.Option(help="Seconds until it has returned.")] = None,
    mode: Annotated[str | None, typer.Option(help="abort, wait or keep.")] = None,
    kv: Annotated[str | None, typer.Option(help="With keep: keep or drop the cache of frozen requests.")] = None,
    lane: Annotated[list[str] | None, typer.Option(help="train or eval; repeatable; default: both.")] = None,
    offload: Annotated[str | None, typer.Option(help="Memory that engines give up: weights,kv_cache.")] = None,
    as_json: Json = False,
) -> None:
    """Stop the stage and show the report."""
    from rollout_svc.observe.terminal import show_report  # noqa: PLC0415 - rich

    if deadline_s is not None and not math.isfinite(deadline_s):  # JSON has no word for it: it would not arrive
        raise ConfigError.at("--deadline-s", f"expected a finite number, not {deadline_s}")
    given: dict[str, Any] = {"deadline_s": deadline_s, "mode": mode, "kv": kv, "lanes": lane or None}
    given["offload"] = None if offload is None else [tag.strip() for tag in offload.split(",")]
    given = {key: value for key, value in given.items() if value is not None}
    answer = _ask(url, token, lambda client: client.pause(**given))
    _answer(answer, as_json=as_json, show=show_report)


@app.command()
def resume(
    url: Url = _URL,
    token: Token = None,
    ticket: Annotated[int | None, typer.Option(help="Only if this is still the current ticket.")] = None,
    as_json: Json = False,
) -> None:
    """Let the stage go on."""
    from rollout_svc.observe.terminal import show_status  # noqa: PLC0415 - rich

    answer = _ask(url, token, lambda client: client.resume(ticket=ticket))
    _answer(answer, as_json=as_json, show=show_status)


@app.command()
def plan(
    trainer: Annotated[Path, typer.Option(help="Trainer config, YAML.")],
    workers: Annotated[int, typer.Option(help="Number of rollout workers.", min=0)],
    as_json: Json = False,
) -> None:
    """Show the concurrency plan for a trainer config."""
    made = make_plan(load_trainer(trainer), [None] * workers)
    if as_json:
        typer.echo(orjson.dumps(made.as_json()))
    else:
        _show_plan(made)


def _show_plan(made: Plan) -> None:
    for key, value in made.as_json().items():
        if key != "warnings":
            typer.echo(f"{key + ':':12} {value}")
    for warning in made.warnings:
        typer.echo(f"warning:     {warning}")


def _ask(url: str, token: str | None, call: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    import asyncio  # noqa: PLC0415 - a quarter of what `--help` costs

    from rollout_svc.rpc.client import RolloutClient  # noqa: PLC0415

    async def ask() -> dict[str, Any]:
        async with RolloutClient(url, token) as client:
            return await call(client)

    return asyncio.run(ask())


def _answer(answer: dict[str, Any], *, as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        typer.echo(orjson.dumps(answer))
    else:
        show(answer)
