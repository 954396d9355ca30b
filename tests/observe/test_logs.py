"""Log lines: where they go, what they look like, what they cost."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from rollout_svc.events import EventBus, WeightUpdateEnded
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import LIBRARIES, Level, configure_logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave logging as it was found."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    structlog.reset_defaults()
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Give the JSON lines written to stderr, and check that stdout is empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_lines_are_json_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is one JSON object on stderr, with event, level, time, and what is bound in context."""
    configure_logs()
    with structlog.contextvars.bound_contextvars(request="r1", epoch=3):
        structlog.get_logger().info("request.aborted", reason="pause")
    structlog.get_logger().info("pause.done")
    first, second = lines(capsys)
    assert first["event"] == "request.aborted"
    assert (first["request"], first["epoch"], first["reason"], first["level"]) == ("r1", 3, "pause", "info")
    assert str(first["timestamp"]).endswith("Z")
    assert "request" not in second


def test_a_terminal_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a line is for reading; asking for JSON gives JSON there too."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logs()
    structlog.get_logger().warning("worker.down", worker="w0")
    assert "worker.down" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    terminal.truncate(0)
    terminal.seek(0)
    configure_logs(json=True)
    structlog.get_logger().warning("worker.down")
    assert json.loads(terminal.getvalue())["event"] == "worker.down"


@pytest.mark.parametrize(("level", "written"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_the_level_is_kept(capsys: pytest.CaptureFixture[str], level: Level, written: int) -> None:
    """Lines below the level are not written."""
    configure_logs(level)
    log = structlog.get_logger()
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert len(lines(capsys)) == written


def test_a_filtered_line_costs_nothing() -> None:
    """A debug line below the level is a function that does nothing: it does not even look at its arguments."""
    configure_logs("info")
    log = structlog.get_logger().bind()
    assert type(log).debug.__name__ == "_nop"


def test_a_value_json_does_not_know_does_not_lose_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Objects are written as their repr; numbers and texts beyond JSON do not lose the line."""
    configure_logs()
    log = structlog.get_logger()
    log.info("odd", value=object(), keys={1: 2})
    log.info("odd", value=2**70)
    log.info("odd", value="\ud800")
    found = lines(capsys)
    assert len(found) == 3
    assert "object object" in str(found[0]["value"])


def test_exceptions_are_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An exception is a field of its line, with its traceback."""
    configure_logs()
    try:
        int("boom")
    except ValueError:
        structlog.get_logger().exception("sample.failed")
        logging.getLogger("aiohttp.server").exception("library failed")
    ours, theirs = lines(capsys)
    assert "ValueError: invalid literal" in str(ours["exception"])
    assert "ValueError: invalid literal" in str(theirs["exception"])


def test_libraries_are_heard_from_warning_up(capsys: pytest.CaptureFixture[str]) -> None:
    """What aiohttp and asyncio log becomes lines like ours, with the logger's name, from warning up."""
    configure_logs("debug")
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("aiohttp.client").warning("unclosed %s", "session")
    logging.getLogger("asyncio").error("never retrieved")
    found = lines(capsys)
    assert [(line["logger"], line["event"], line["level"]) for line in found] == [
        ("aiohttp.client", "unclosed session", "warning"),
        ("asyncio", "never retrieved", "error"),
    ]


def test_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Setting up twice writes each line once."""
    configure_logs()
    configure_logs()
    logging.getLogger("aiohttp").warning("once")
    structlog.get_logger().info("once")
    assert len(lines(capsys)) == 2


def test_loggers_outlive_a_replaced_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that was used before stderr was replaced writes to the new one."""
    configure_logs(json=True)
    log = structlog.get_logger()
    log.info("before")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    log.info("after")
    assert json.loads(replaced.getvalue())["event"] == "after"


@pytest.mark.parametrize(("level", "told"), [("info", ["info", "warning"]), ("warning", ["warning"]), ("error", [])])
def test_an_update_that_failed_is_a_warning(capsys: pytest.CaptureFixture[str], level: Level, told: list[str]) -> None:
    """Who looks at warnings alone hears that the engines have not got what the trainer gave them, and why."""
    configure_logs(level=level)
    bus = EventBus()
    log_events(bus, level)
    bus.emit(WeightUpdateEnded(7, "disk", True, 1.0, {}, 0, 0, ""))
    bus.emit(WeightUpdateEnded(8, "disk", False, 1.0, {}, 0, 0, "w1: no room"))
    written = lines(capsys)
    assert [line["level"] for line in written] == told
    assert all(line["error"] == "w1: no room" for line in written if line["level"] == "warning")
