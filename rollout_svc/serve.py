"""`rollout-svc serve`: the service and its control API as one process, from start to the last signal.

Invariants:

- SIGUSR1 writes who is stuck to the log, whatever state the service is in; it changes nothing.
- The first SIGINT or SIGTERM drains and exits 0; the second exits at once.
- Nothing is started before the configuration was found to work and the port was bound.
- Exit codes: 0 stopped on request, 1 it ran and failed, 2 bad configuration.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

import structlog

from rollout_svc.config import Config
from rollout_svc.errors import ConfigError, ServiceError
from rollout_svc.events import ComponentDied, EventBus
from rollout_svc.loop import new_event_loop
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import Level
from rollout_svc.observe.metrics import Metrics
from rollout_svc.recovery import Restore
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartFailed

__all__ = ["COLLECTOR", "EXIT_BAD_CONFIG", "EXIT_FAILED", "EXIT_OK", "serve"]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
_SECOND_SIGNAL: Final = 130  # what a shell shows for a process that SIGINT ended
COLLECTOR: Final = (20_000, 2, 5_000)
"""Young objects before they are collected, some milliseconds of a turn; how many such collections before what survived
them is looked at again, in one turn as well: 100 of them held it for a second while 50,000 requests began; and how many
of those before everything is, which is 40 us for each request in flight."""
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
    bus = EventBus(on_error=lambda event, error: _log.error("subscriber.failed", event_type=type(event), error=error))
    service = RolloutService(config, bus=bus, restore=restore)
    log_events(bus, level)
    if sys.stderr.isatty():
        _show_weights(bus)
    metrics = Metrics(bus, service.status)
    stop, failed = asyncio.Event(), asyncio.Event()
    bus.subscribe(ComponentDied, lambda _: failed.set())
    _on_signals(stop)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _tell_stuck, service)
    async with serve_http(service, metrics.render) as url:
        await service.start()
        if service.recovered:
            _log.info("journal.recovered", path=config.buffer.path, **service.recovered)
        _say(f"service.listening url={url}")
        _log.info("service.listening", url=url, workers=len(config.workers))
        try:
            code = await _run(service, url, stop, failed)
        finally:
            await service.stop()
            _log.info("service.stopped", survivors=service.survivors)
        return code, service.survivors


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
        except StartFailed as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED
        _calm_collector()
        _say(f"service.ready url={url}")
        _log.info("service.running", plan=service.concurrency())
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


def _calm_collector() -> None:
    """Collect rarely: a sample is freed by its last reference, and collections were a third of its cost."""
    gc.freeze()  # what was imported lives as long as the process: no collection needs to look at it again
    gc.set_threshold(*COLLECTOR)


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


def _tell_stuck(service: RolloutService) -> None:
    """Write who is stuck to the log: a line with the counts, then one for each, a few at a time."""
    try:
        stuck = service.stuck()
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
