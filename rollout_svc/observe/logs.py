"""Log lines: structlog, for people on a terminal, as JSON elsewhere.

Invariants:

- Lines go to stderr; stdout belongs to what a command prints.
- A line below the level costs a call that does nothing: filtering happens when the logger is made, not per line.
- Whatever is bound in context variables (request, group, epoch, version) is on every line.
- A value that JSON does not know is written as its `repr`: the line is not lost.
"""

import json as stdlib_json
import logging
import sys
from typing import Any, Literal, get_args

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["LEVELS", "Level", "configure_logs"]

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the least to the gravest."""

LIBRARIES = ("aiohttp", "asyncio")
"""Loggers of the standard library's kind that are worth hearing, from warning up."""


def configure_logs(level: Level = "info", *, json: bool | None = None) -> None:
    """Set up logging for the process; calling it again replaces the set-up.

    Args:
        level: The least level that is written.
        json: Write JSON lines; None: unless stderr is a terminal.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        shared.append(structlog.processors.format_exc_info)
        render: Processor = _render_json
    else:
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_StderrLoggerFactory(),
        cache_logger_on_first_use=True,
    )
    _route_libraries(shared, render)


class _StderrLogger:
    """Writes whole lines to whatever stderr is at that moment: it may be replaced while loggers live on."""

    __slots__ = ()

    def msg(self, message: str) -> None:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = fatal = exception = log = msg


class _StderrLoggerFactory:
    def __call__(self, *_args: Any) -> WrappedLogger:
        return _StderrLogger()


class _StderrHandler(logging.Handler):
    """The same, for loggers of the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _StderrLogger().msg(self.format(record))
        except Exception:  # noqa: BLE001 - the standard library's rule: a handler reports its failure and goes on
            self.handleError(record)


def _route_libraries(shared: list[Processor], render: Processor) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared[:1], structlog.stdlib.add_logger_name, *shared[1:]],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
    )
    handler = _StderrHandler()
    handler.setFormatter(formatter)
    for name in LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [handler]
        library.setLevel(logging.WARNING)
        library.propagate = False


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    try:
        return orjson.dumps(dict(event), default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # beyond 64 bits, or half a character: rare, and no reason to lose the line
        return stdlib_json.dumps({str(key): repr(value) for key, value in event.items()})
