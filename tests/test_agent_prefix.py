"""What an engine is sent of a conversation: all of it, written once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.agent.prefix import Prefix
from rollout_svc.engines import WrittenIds
from rollout_svc.sample import Sample
from rollout_svc.segment import Segment
from tests.support.caller import Table

IDS = st.lists(st.integers(0, 300), max_size=3)
MOVES = st.lists(st.tuples(st.sampled_from(["made", "put", "end", "drop", "again", "look"]), IDS), max_size=20)


@given(MOVES)
def test_it_is_what_the_sample_has(moves: list[tuple[str, list[int]]]) -> None:
    """P6: whatever was said, dropped or begun again in between, and whenever it was looked at."""
    sample = Table().sample
    attempt = sample.hand_out()
    prefix = Prefix()
    for move, ids in moves:
        _do(sample, attempt, move, ids)
        if move == "look":
            check(prefix, sample)
    check(prefix, sample)


def _do(sample: Sample, attempt: int, move: str, ids: list[int]) -> None:
    if move in ("made", "put"):
        sample.extend(attempt, Segment(ids, [0.0] * len(ids), (), by_model=move == "made", turn=sample.turn))
    elif move == "end":
        sample.turn += 1
    elif move == "drop":
        sample.drop_turn(attempt)
    elif move == "again":
        sample.begin_again(attempt, ids, "rewritten")


def check(prefix: Prefix, sample: Sample) -> None:
    """It tells all ids, in the order in which a call has them, and how many."""
    wanted = sample.prefix_ids() + sample.turn_ids()
    assert prefix.length(sample) == len(wanted)
    written = prefix.of(sample)
    assert (written.ids, written.length) == (wanted, len(wanted))


def test_turns_that_are_whole_are_written_once() -> None:
    """The second call writes what is new alone."""
    sample = Table().sample
    attempt = sample.hand_out()
    prefix = Prefix()
    made = Counted([7, 8])
    sample.extend(attempt, Segment(made, [0.0] * 2, (), turn=0))
    sample.turn = 1
    prefix.of(sample)
    sample.extend(attempt, Segment([9], [0.0], (), by_model=False, turn=1))
    reads = made.reads
    assert prefix.of(sample).ids == [*sample.prompt_ids, 7, 8, 9]
    assert made.reads == reads


class Counted(list[int]):
    """Counts how often it is asked for its length, as whoever writes it does."""

    reads = 0

    def __len__(self) -> int:
        self.reads += 1
        return super().__len__()


@given(IDS, IDS)
def test_written_ids(first: list[int], second: list[int]) -> None:
    """Pieces put together read as one list, empty ones too."""
    both: Any = WrittenIds.of(first).plus(second)
    assert (both.ids, both.length) == (first + second, len(first + second))
