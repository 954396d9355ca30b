"""The parts of a check: its vocabulary, its clock, its places, where it acts, and what is typed."""

import asyncio
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.checking import places
from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.findings import Report
from rollout_svc.checking.stepping import Stepped
from rollout_svc.checking.subject import options_of
from rollout_svc.checking.tongue import Tongue, spoken
from rollout_svc.checking.trying import points
from rollout_svc.errors import ConfigError


@given(st.text(max_size=30))
def test_what_the_model_says_is_never_what_a_tokenizer_writes(text: str) -> None:
    """The same text, and other ids: whoever encodes a turn again is found out."""
    tongue, ids = Tongue(), spoken(text)
    assert tongue.decode(ids) == text
    assert not set(ids) & set(tongue.encode(text))
    assert ids != tongue.encode(tongue.decode(ids))


@given(st.integers(0, 5000))
def test_points_are_all_waits_or_some_spread_over_them(waits: int) -> None:
    """From the first to the last, each once, and never so many that a check does not end."""
    found = points(waits)
    assert found == sorted(set(found))
    assert len(found) == min(waits, len(found)) <= 40
    if waits:
        assert (found[0], found[-1]) == (1, waits)


@given(st.lists(st.sampled_from(["wait", "end", "catch"]), max_size=8))
def test_a_coroutine_runs_the_same_when_it_is_watched(steps: list[str]) -> None:
    """What it waits for arrives, what is thrown in arrives, what it returns goes out, and each wait is told."""

    async def work() -> list[str]:
        seen = []
        for step in steps:
            task = asyncio.current_task()
            if task is not None and step != "wait":
                task.cancel(step)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                seen.append(str(error))
                if task is not None:
                    task.uncancel()
                if step == "end":
                    return seen
        return [*seen, "whole"]

    told: list[int] = []

    async def both() -> tuple[list[str], list[str]]:
        return await work(), await Stepped(work(), told.append)

    with asyncio.Runner(loop_factory=CheckLoop) as runner:
        plain, watched = runner.run(both())
    assert plain == watched
    assert told == list(range(1, len(told) + 1))


def test_an_hour_passes_at_once_unless_a_thread_works() -> None:
    """Virtual where nothing real goes on, real where something does."""

    async def work() -> tuple[float, float, float]:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        await asyncio.sleep(3600)
        passed, real = loop.time(), time.monotonic() - began
        before = loop.time()
        await asyncio.to_thread(threading.Event().wait, 0.05)
        return passed, real, loop.time() - before

    with asyncio.Runner(loop_factory=CheckLoop) as runner:
        passed, real, working = runner.run(work())
    assert passed >= 3600
    assert real < 30
    assert 0.04 <= working < 30


def test_the_place_is_taken_out_of_what_the_service_says() -> None:
    """A message with a place is parted; one without is left as it is."""
    assert places.split("KeyError: 'a' (/x/mine.py:12 in Mine.judge)") == ("KeyError: 'a'", "/x/mine.py:12")
    assert places.split("KeyError: 'a' (odd)") == ("KeyError: 'a' (odd)", "")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["a=1", "b=x", 'c="1"', "d=[1, 2]", "e="], {"a": 1, "b": "x", "c": "1", "d": [1, 2], "e": ""}),
        (["pattern=(a=b)"], {"pattern": "(a=b)"}),
        ([], {}),
    ],
)
def test_options_are_json_where_they_are(given: list[str], made: dict[str, Any]) -> None:
    """`key=value`: numbers, lists and texts, quoted or not."""
    assert options_of(given) == made


def test_an_option_without_a_value_is_refused() -> None:
    """P35: one line, at the option."""
    for wrong in ("a", "=1"):
        with pytest.raises(ConfigError, match="--option: expected key=value"):
            options_of([wrong])


def test_a_rule_that_is_broken_twice_is_one_finding() -> None:
    """The first time is told, and how often it was."""
    report = Report("agent", "m:a", {"ids": "they grow"})
    report.add("ids", "ran it", "first")
    report.add("ids", "ran it again", "second", "a.py:1")
    [finding] = report.findings
    assert (finding.done, finding.happened, finding.where, finding.times) == ("ran it", "first", "a.py:1", 2)
    assert report.as_json()["ok"] is False
