"""Portions: over all shards each line comes once in an epoch, also where a shard goes on after a restart."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.buffer.journal.fingerprint import differences, fingerprint_of
from rollout_svc.config import Portion, PromptsConfig
from rollout_svc.producer.sources import IteratorSource, JsonlSource, PromptSource
from tests.producer.test_sources import Reader
from tests.support.stage import make_config

counts = st.integers(1, 40)
shards = st.integers(1, 6)
Make = Callable[[Portion], PromptSource]


class Stated:
    """An iterable that keeps its own position."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Any:
        while self.at < self.count:
            self.at += 1
            yield line(self.at - 1)

    def state(self) -> int:
        """Where it is."""
        return self.at

    def restore(self, state: int) -> None:
        """Go there."""
        self.at = state


def line(number: int) -> dict[str, Any]:
    return {"id": f"p{number}", "input_ids": [number]}


def in_two_lives(make: Make, portion: Portion, first: int) -> list[str]:
    """What a source gives that is restored after `first` lines."""

    async def read() -> list[str]:
        one = make(portion)
        reader = Reader(one)
        found = [line.prompt_id for _ in range(first) if (line := await reader.next()) is not None]
        position = one.position
        one.close()
        again = make(portion)
        again.restore(position)
        return found + [line.prompt_id for line in await Reader(again).all()]

    return asyncio.run(read())


@given(counts, shards, st.integers(0, 60), st.integers(1, 3), st.booleans())
def test_each_line_of_a_file_comes_once_in_an_epoch(
    count: int, of: int, first: int, epochs: int, shuffle: bool
) -> None:
    """Whatever the order, the number of shards, and where each of them was restarted."""  # P31
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_bytes(b"\n".join(orjson.dumps(line(n)) for n in range(count)))
        config = PromptsConfig(jsonl=str(path), shuffle=shuffle, epochs=epochs)

        def make(portion: Portion) -> PromptSource:
            return JsonlSource(path, config, refused={}, where="t", portion=portion)

        found = [in_two_lives(make, Portion(index, of), first) for index in range(of)]
    assert Counter(prompt for part in found for prompt in part) == {f"p{n}": epochs for n in range(count)}
    for epoch in range(epochs):
        turn = [
            prompt
            for index, part in enumerate(found)
            for prompt in part[epoch * Portion(index, of).count(count) :][: Portion(index, of).count(count)]
        ]
        assert sorted(turn) == sorted(f"p{n}" for n in range(count))


@pytest.mark.parametrize("kind", ["plain", "stated"])
@given(count=counts, of=shards, first=st.integers(0, 20))
def test_each_line_of_a_source_comes_once(kind: str, count: int, of: int, first: int) -> None:
    """Every shard iterates over a source of its own, and takes its places alone, also in its next life."""  # P31

    def make(portion: Portion) -> PromptSource:
        given: Any = Stated(count) if kind == "stated" else (line(n) for n in range(count))
        return IteratorSource(given, refused={}, where="t", portion=portion)

    found = [in_two_lives(make, Portion(index, of), first) for index in range(of)]
    for index, part in enumerate(found):
        assert part == [f"p{n}" for n in range(index, count, of)]


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 8))
def test_a_portions_arithmetic(places: int, of: int, index: int) -> None:
    """What it counts and where it goes on agree with what it has."""
    if index >= of:
        with pytest.raises(ValueError, match="no portion"):
            Portion(index, of)
        return
    portion = Portion(index, of)
    mine = [place for place in range(places) if portion.has(place)]
    assert portion.count(places) == len(mine)
    assert portion.after(0) == 0
    assert [portion.after(used) for used in range(1, len(mine) + 1)] == [place + 1 for place in mine]


def test_a_journal_is_that_of_one_shard() -> None:
    """Positions of a shard mean nothing to another, nor among another number of shards."""  # P31
    config = make_config("http://e")
    one, other = fingerprint_of(config, {}, Portion(0, 2)), fingerprint_of(config, {}, Portion(0, 3))
    assert differences(one, one) == []
    assert differences(one, other) == ["task 't', prompts, shard: 0 of 2 in the journal, 0 of 3 in the configuration"]
    assert differences(fingerprint_of(config, {}), one) != []
