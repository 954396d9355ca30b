"""What a cut turn gives back, so that a text it should stop at is found wherever a cut divides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.config import SamplingConfig
from rollout_svc.stop_texts import Decode, beginning, given_back, stops_of

PIECES = [b"a", b"b", b"ab", b"aab", b"", b" ", "é".encode(), "é".encode()[:1], "é".encode()[1:], "aé".encode()[:2]]
"""A vocabulary: letters, words, a special token (4), halves of a character."""

TOKENS = st.lists(st.integers(0, 3) | st.integers(0, len(PIECES) - 1), max_size=8)
STOPS = st.lists(
    st.text("ab", min_size=2, max_size=4) | st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=2
)
CUTS = st.lists(st.integers(1, 5) | st.integers(0, 8), max_size=5)
MANY = settings(max_examples=500)


@st.composite
def tokens_and_stops(draw: st.DrawFn, streams: int = 1) -> tuple[list[list[int]], list[str]]:
    """Stop texts, and streams of tokens in each of which one of them is somewhere."""
    stops = draw(STOPS)
    letters = {"a": [0], "b": [1], " ": [5], "é": [7, 8]}
    made = []
    for _ in range(streams):
        spelt = [token for letter in draw(st.sampled_from(stops)) for token in letters[letter]]
        made.append(draw(TOKENS) + spelt + draw(TOKENS))
    return made, stops


def decode(ids: Sequence[int]) -> str:
    """The text of some tokens."""
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


def spell(ids: Sequence[int]) -> str:
    """The same with the special token written out."""
    return b"".join(PIECES[token] or b"ba" for token in ids).decode(errors="replace")


def stopped(ids: Sequence[int], stops: Sequence[str], says: Decode) -> bool:
    """Whether an engine that has made these in one call, and reads them so, sees a stop text."""
    return any(stop in says(ids) for stop in stops)


def turn(
    make: Callable[[int, int], int | None],
    stops: Sequence[str],
    cuts: Sequence[int],
    ways: Sequence[Decode],
    says: Decode = decode,
) -> list[int]:
    """One turn over as many calls as it is cut, each after so many tokens, and one that is not.

    Args:
        make: the token that a call makes at a place; None: it ends of itself there.
        stops: the texts it ends at.
        cuts: tokens each call makes before it is cut.
        ways: the text of tokens, where what is given back may look at it.
        says: as the engine reads them.
    """
    ids: list[int] = []
    stands = 0
    for call, most in enumerate([*cuts, None]):
        count = given_back(ids, stops, ways, stands)
        assert 0 <= count <= len(ids) - stands
        ids = ids[: len(ids) - count]
        stands = len(ids)
        while most is None or len(ids) - stands < most:
            token = make(call, len(ids))
            if token is None:
                return ids
            ids.append(token)
            if stopped(ids[stands:], stops, says):
                return ids
    raise AssertionError("the last call is not cut")


@pytest.mark.parametrize("ways", [(decode, spell), ()], ids=["text", "no-text"])
@MANY
@given(made=tokens_and_stops(), cuts=CUTS)
def test_a_turn_made_again_the_same_ends_where_an_uncut_one_ends(
    ways: Sequence[Decode], made: tuple[list[list[int]], list[str]], cuts: list[int]
) -> None:
    """Whatever is cut, where the same tokens are made again: with the text, and by counting bytes alone."""
    [tokens], stops = made
    tokens = [token for token in tokens if ways or PIECES[token]]  # without it, each says something

    def make(_: int, place: int) -> int | None:
        return tokens[place] if place < len(tokens) else None

    assert turn(make, stops, cuts, ways) == turn(make, stops, (), ways)


@MANY
@given(made=tokens_and_stops(streams=3), cuts=CUTS, says=st.sampled_from([decode, spell]))
def test_where_the_text_is_known_no_turn_goes_on_past_a_stop_text(
    made: tuple[list[list[int]], list[str]], cuts: list[int], says: Decode
) -> None:
    """Other weights or draws make other tokens of what is given back: the first stop text in all of it is its end."""
    calls, stops = made

    def make(call: int, place: int) -> int | None:
        tokens = calls[call % len(calls)]
        return tokens[place] if place < len(tokens) else None

    ids = turn(make, stops, cuts, (decode, spell), says)
    first = next((end for end in range(len(ids) + 1) if stopped(ids[:end], stops, says)), len(ids))
    assert ids == ids[:first]


@MANY
@given(TOKENS, TOKENS, STOPS)
def test_nothing_is_given_back_that_no_stop_text_begins_with(
    head: list[int], tail: list[int], stops: list[str]
) -> None:
    """Where the text is known, only what really is a beginning is made again."""
    ids = head + tail
    if not any(beginning(decode(ids), [stop]) for stop in stops):
        assert given_back(ids, stops, [decode]) == 0


@pytest.mark.parametrize(
    ("text", "stop", "begins"),
    [
        ("the fir", "first", True),
        ("the first", "first", False),  # its engine has seen that one
        ("the f.", "first", False),
        ("", "first", False),
        ("---", "---end", True),
        ("caf\N{REPLACEMENT CHARACTER}", "café", True),
        ("cof\N{REPLACEMENT CHARACTER}", "café", False),
        ("x\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}", "終", True),
        ("x\N{REPLACEMENT CHARACTER}", "end", False),
    ],
)
def test_a_beginning(text: str, stop: str, begins: bool) -> None:
    """The end of a text with which a stop text begins, half a character taken for what it may become."""
    assert beginning(text, [stop]) is begins


def test_tokens_that_say_nothing_hide_no_beginning() -> None:
    """Special tokens are no text: what is before them is looked at, however many there are."""
    assert given_back([1, 0, *[4] * 50], ["ab"], [decode]) == 51


def test_a_turn_without_stop_texts_gives_nothing_back() -> None:
    """Nothing to look for, nothing to make again."""
    assert given_back([1, 2, 3], (), [decode]) == given_back([1, 2, 3], (), ()) == 0


def test_settings_passed_on_as_they_are_name_stop_texts_too() -> None:
    """`extra` takes the place of `stop`, as it does in the request; what is no text is the engine's to refuse."""
    assert stops_of(SamplingConfig(stop=("a", "b"))) == ("a", "b")
    assert stops_of(SamplingConfig(stop=("a",), extra={"stop": "c"})) == ("c",)
    assert stops_of(SamplingConfig(extra={"stop": ["c", 1, ""]})) == ("c",)
    assert stops_of(SamplingConfig(stop=("a",), extra={"stop": None})) == ("a",)
    assert stops_of(SamplingConfig(extra={"stop": 7})) == ()
