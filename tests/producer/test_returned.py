"""Prompts that come back go first, once, and move no position."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.buffer.storage import Position
from rollout_svc.producer.returned import returned_first
from rollout_svc.producer.sources import PromptSource, PushSource
from rollout_svc.prompt import Prompt


def pushed(*prompt_ids: str) -> PushSource:
    """A source with these prompts."""
    source = PushSource(refused={})
    source.push([{"id": prompt_id, "input_ids": [1]} for prompt_id in prompt_ids])
    return source


def prompt(prompt_id: str, task: str = "t", **rest: Any) -> Prompt:
    return Prompt(prompt_id=prompt_id, task=task, input_ids=[7, 8], **rest)


def drained(source: PromptSource) -> list[tuple[str, Position | None]]:
    """Every prompt of a source, with where each moves it."""
    found = []
    while (line := source.peek()) is not None:
        found.append((line.prompt_id, source.advance()))
    return found


def test_what_comes_back_goes_first() -> None:
    """In its order, before what the source gives; the source's position moves with its own prompts only."""  # P31
    sources = returned_first({"t": pushed("a", "b"), "u": pushed("c")}, [prompt("y"), prompt("x"), prompt("z", "u")])
    used = [Position(1), Position(2)]
    assert drained(sources["t"]) == [("y", None), ("x", None), ("a", used[0]), ("b", used[1])]
    assert drained(sources["u"]) == [("z", None), ("c", used[0])]


def test_a_source_with_nothing_to_give_back_is_the_same() -> None:
    """Where nothing comes back, nothing is put before it."""
    source = pushed("a")
    assert returned_first({"t": source}, []) == {"t": source}


def test_it_is_exhausted_when_both_are() -> None:
    """What came back is still to come, whatever the source says of itself."""

    class Ended(PushSource):
        exhausted = True

    source = returned_first({"t": Ended(refused={})}, [prompt("x")])["t"]
    told = [source.exhausted]
    source.advance()
    told.append(source.exhausted)
    assert told == [False, True]
    assert source.peek() is None


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({}, "input_ids", [7, 8]),
        ({"content": "text"}, "text", "text"),
        ({"content": [{"role": "user", "content": "x"}]}, "messages", [{"role": "user", "content": "x"}]),
    ],
)
def test_it_is_the_line_it_was(given: dict[str, Any], key: str, value: Any) -> None:
    """Content of each kind, ground truth, meta and what is the engine's come back as they were handed in."""
    rest: dict[str, Any] = {"ground_truth": 3, "meta": {"n": 1}, "engine_extra": {"image": "i"}}
    line = returned_first({"t": pushed()}, [prompt("x", **given, **rest)])["t"].peek()
    assert line is not None
    assert line.content == rest | {key: value}
    assert line.problem is None
