"""What every test needs."""

import asyncio
import gc
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.support.stalls import Stalls

# pytest-asyncio asks for the main thread's loop around each synchronous fixture; where none was ever set, Python 3.11
# makes one that nobody closes, and the run ends with a ResourceWarning. Once set, to None, it is not made.
asyncio.set_event_loop(None)

AGAIN = "run once more"
_RAY = {Path(__file__).parent / "ray", Path(__file__).parent / "cluster"}
_STALLS = pytest.StashKey[Stalls]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, for what it starts is shared, and all tests of Ray: one cluster."""
    for item in items:
        together = "ray" if _RAY & set(item.path.parents) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(together))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Watch for moments in which the whole machine stands still."""
    session.stash[_STALLS] = Stalls()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the watch."""
    session.stash[_STALLS].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that needs a process without a cluster in one, where this one is connected; nothing undoes that."""
    ray: Any = sys.modules.get("ray")
    if pyfuncitem.get_closest_marker("unconnected") is None or ray is None or not ray.is_initialized():
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pyfuncitem.nodeid)]
    run = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was run once more."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for title, said in getattr(report, "sections", []) if getattr(report, "when", "") == "call" else []:
                if title == AGAIN:
                    terminalreporter.line(f"run once more: {report.nodeid}: {said}", yellow=True)


def _forget_failure() -> None:
    """Drop what a run that was cut short never awaited or closed: it is not the next one's."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test once more where it failed while the machine stood still, and say so; else its first word counts."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = time.monotonic()
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    stood = item.session.stash[_STALLS].since(began) if any(report.failed for report in reports) else 0.0
    if stood and isinstance(item, pytest.Function):
        reports.clear()
        _forget_failure()
        item._initrequest()  # what pytest does itself before the first run
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            report.sections.append((AGAIN, f"the machine stood still for {stood:.1f} s in the first run"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
