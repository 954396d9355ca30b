"""What may excuse a bound in real time that was missed: the machine stood still, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.stalls import Stalls, main


@pytest.fixture
def stalls() -> Iterator[Stalls]:
    watch = Stalls(least_s=0.2)
    yield watch
    watch.close()


def test_a_standstill_is_seen_by_whoever_asks_after_it(stalls: Stalls) -> None:
    """One that ended just now is in the answer, also where the process that watches has not said so yet."""
    stalls.since(0.0)
    began = time.monotonic()
    os.kill(stalls.pid, signal.SIGSTOP)
    select.select([], [], [], 0.5)
    os.kill(stalls.pid, signal.SIGCONT)
    assert stalls.since(began) > 0.2


def test_work_is_no_standstill(stalls: Stalls) -> None:
    """A process that holds its own lock for long is not excused by it."""
    stalls.since(0.0)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        sum(range(100_000))
    assert stalls.since(began) < 0.5


def test_what_fails_while_the_machine_runs_is_not_run_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Its first word counts."""
    assert main([sys.executable, "-c", "print('ran'); raise SystemExit(3)"]) == 3
    assert capfd.readouterr().out.count("ran") == 1
