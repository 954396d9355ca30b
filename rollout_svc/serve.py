"""`rollout-svc serve`: the service and its control API as one process, from start to the last signal.

Invariants:

- SIGUSR1 writes who is stuck to the log, whatever state the service is in; it changes nothing.
- The first SIGINT or SIGTERM drains and exits 0; the second exits at once.
- Nothing is started before the configuration was found to work and the port was bound. Shards are made before it, for
  what they are is asked there; they have ended, with their engines, when the process does.
- Exit codes: 0 stopped on request, 1 it ran and failed, 2 bad configuration.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import structlog

from rollout_svc.config import Config
from rollout_svc.errors import ConfigError, NotNow, ServiceError
from rollout_svc.events import ComponentDied, EventBus
from rollout_svc.hosting import calm_collector, hosted
from rollout_svc.loop import new_event_loop
from rollout_svc.observe.logs import Level
from rollout_svc.recovery import Restore
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartFailed

__all__ = ["EXIT_BAD_CONFIG", "EXIT_FAILED", "EXIT_OK", "serve"]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
_SECOND_SIGNAL: Final = 130  # what a shell shows for a process that SIGINT ended
_LINES_AT_ONCE: Final = 64  # log lines in one turn of the loop
_log = structlog.get_logger("serve")


def serve(config: Config, level: Level = "info", restore: Restore | None = None) -> int:
    """Run until a signal; returns the exit code. See `RolloutService` for `restore`.

    A task that swallows its cancellation would hold the end of the loop for ever, so with one left the process is
    ended without it: everything that was to be drained has been.
    """
    runner = asyncio.Runner(loop_factory=new_event_loop)  # answers that land by the thousand must not hold a pause
    try:
        code, survivors = runner.run(_serve(config, level, restore))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        code, survivors = EXIT_BAD_CONFIG, ()
    if survivors:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    runner.close()
    return code


async def _serve(config: Config, level: Level, restore: Restore | None) -> tuple[int, tuple[str, ...]]:
    stop, failed = asyncio.Event(), asyncio.Event()
    async with _hosted(config, level, restore, _prepare(stop, failed)) as (service, url):
        _say(f"service.listening url={url}")
        code = await _run(service, url, stop, failed)
    return code, service.survivors


def _hosted(
    config: Config, level: Level, restore: Restore | None, before: Callable[[RolloutService], None]
) -> AbstractAsyncContextManager[tuple[RolloutService, str]]:
    """Start the service, or shards that are one; what only looks has to be awaited over those."""
    shards = config.producer.shards
    if shards == 1:
        return hosted(config, level, restore, before=before)
    if restore is not None:
        words = f"makes one journal of a snapshot, and {shards} shards (producer.shards) have one each: leave it out"
        raise ConfigError.at("--restore", words)
    from rollout_svc.ray.sharded import hosted_shards  # noqa: PLC0415 - what it needs of Ray is not for all

    return hosted_shards(config, level, before)


def _prepare(stop: asyncio.Event, failed: asyncio.Event) -> Callable[[RolloutService], None]:
    """Have signals and deaths heard before anything is started."""

    def prepare(service: RolloutService) -> None:
        if sys.stderr.isatty():
            _show_weights(service.bus)
        service.bus.subscribe(ComponentDied, lambda _: failed.set())
        _on_signals(stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _on_stuck, service)

    return prepare


async def _run(service: RolloutService, url: str, stop: asyncio.Event, failed: asyncio.Event) -> int:
    """Wait for the engines, then for the end."""
    stopping = asyncio.ensure_future(stop.wait())
    ready = asyncio.ensure_future(service.ready())
    try:
        await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return EXIT_OK
        try:
            ready.result()
        except (StartFailed, NotNow) as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED
        calm_collector()
        _say(f"service.ready url={url}")
        _log.info("service.running", plan=await _plan(service))
        while not stop.is_set():
            dying = asyncio.ensure_future(failed.wait())
            await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            failed.clear()
            if service.failure is not None:
                return EXIT_FAILED
        return EXIT_OK
    finally:
        for task in (stopping, ready):
            task.cancel()


def _show_weights(bus: EventBus) -> None:
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches

    from rollout_svc.observe.weight_bar import show_weights  # noqa: PLC0415 - as above

    show_weights(bus, Console(stderr=True))


def _say(line: str) -> None:
    """One line on stdout for whoever started this process; the log is on stderr."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _on_signals(stop: asyncio.Event) -> None:
    def handle() -> None:
        if stop.is_set():
            os._exit(_SECOND_SIGNAL)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)


def _on_stuck(service: RolloutService) -> None:
    """Have who is stuck written to the log."""
    telling = asyncio.ensure_future(_tell_stuck(service))
    _TELLING.add(telling)
    telling.add_done_callback(_TELLING.discard)


_TELLING: Final[set[asyncio.Future[None]]] = set()  # a task that nobody holds may be collected


async def _answer(told: Any) -> Any:
    """What a call that only looks says: over shards it has to be awaited."""
    return await told if inspect.isawaitable(told) else told


async def _plan(service: RolloutService) -> Any:
    """The plan in force, or why nobody can tell it now."""
    try:
        return await _answer(service.concurrency())
    except ServiceError as error:
        return str(error)


async def _tell_stuck(service: RolloutService) -> None:
    """Write who is stuck to the log: a line with the counts, then one for each, a few at a time."""
    try:
        stuck = await _answer(service.stuck())
    except ServiceError as error:  # not started yet
        _log.warning("stuck.nobody", why=str(error))
        return
    summary = {key: value for key, value in stuck.items() if key not in ("samples", "groups")}
    _log.warning("stuck.counts", state=service.state, **summary, groups=len(stuck["groups"]))
    _write(("stuck.sample", sample) for sample in stuck["samples"])
    _write(("stuck.group", group) for group in stuck["groups"])


def _write(lines: Iterator[tuple[str, dict[str, Any]]]) -> None:
    slice_ = list(itertools.islice(lines, _LINES_AT_ONCE))
    for event, told in slice_:
        _log.warning(event, **told)
    if slice_:
        asyncio.get_running_loop().call_soon(_write, lines)
