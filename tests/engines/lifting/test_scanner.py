"""The scanner takes one key's values out of JSON, whatever its shape and however it is cut."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_svc.engines.lifting import Scanner
from rollout_svc.errors import SampleFailure

KEY = "routed_experts"

NUMBERS = st.recursive(st.integers(-5, 70_000), lambda inner: st.lists(inner, max_size=4), max_leaves=12).filter(
    lambda value: isinstance(value, list)
)
TEXTS = st.text(max_size=12) | st.sampled_from(['"', "\\", '\\"routed_experts', '"routed_experts":', KEY, "a\\", "/+="])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXTS.filter(lambda key: key != KEY), inner, max_size=4)
        | st.fixed_dictionaries(
            {KEY: NUMBERS | TEXTS | st.none() | st.booleans() | st.integers(0, 9)}, optional={"a": inner, '\\"': inner}
        )
    ),
    max_leaves=20,
)
BODIES = st.dictionaries(TEXTS.filter(lambda key: key != KEY), VALUES, max_size=4)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def spelled(value: Any, style: str) -> bytes:
    """JSON as somebody's library writes it."""
    if style == "tight":
        return orjson.dumps(value)
    if style == "airy":
        return json.dumps(value, ensure_ascii=True, indent=1, separators=(" ,", " \n: ")).encode()
    return json.dumps(value, ensure_ascii=style == "ascii").encode()


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """The same bytes in pieces of these sizes, over and over."""
    pieces, at, number = [], 0, 0
    while at < len(data):
        pieces.append(data[at : at + sizes[number % len(sizes)]])
        at, number = at + len(pieces[-1]), number + 1
    return pieces


def scanned(pieces: list[bytes]) -> tuple[bytes, list[tuple[str, bytes]]]:
    """What stays, and the values that were whole, in order."""
    scanner = Scanner(KEY)
    parts = [part for piece in pieces for part in scanner.feed(piece)] + scanner.finish()
    values: list[tuple[str, bytes]] = []
    for part in parts:
        if part.kind in ("string", "list"):
            values.append((part.kind, b""))
        elif part.kind == "piece":
            values[-1] = (values[-1][0], values[-1][1] + part.data)
    assert sum(part.kind == "end" for part in parts) == len(values)
    return b"".join(part.data for part in parts if part.kind == "rest"), values


def lifted(value: Any, found: list[Any]) -> Any:
    """The same by walking what a parser made of it: strings and lists at the key become null, and are told."""
    if isinstance(value, list):
        return [lifted(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    left = {}
    for key, item in value.items():
        taken = key == KEY and isinstance(item, str | list)
        if taken:
            found.append(item)
        left[key] = None if taken else lifted(item, found)
    return left


@given(body=BODIES, style=st.sampled_from(["tight", "ascii", "plain", "airy"]), sizes=CUTS)
@example(body={'\\"routed_experts': "x", KEY: [[[1]]]}, style="tight", sizes=[1])
@example(body={"a": {KEY: [1, [2]], "b": KEY}, "c": [{KEY: '\\/\n\U0001f600"'}]}, style="ascii", sizes=[1])
def test_it_is_as_if_it_had_been_parsed_whole(body: dict[str, Any], style: str, sizes: list[int]) -> None:
    """Any JSON, in any cut: what stays and what is taken are those of a parser; a list is taken as it was written."""
    found: list[Any] = []
    left = lifted(body, found)
    rest, values = scanned(cut(spelled(body, style), sizes))
    assert json.loads(rest) == left
    assert [raw.decode() if kind == "string" else json.loads(raw) for kind, raw in values] == found


@given(
    data=st.binary(max_size=200) | st.text(alphabet='\\"routed_experts:[]{}, 1u', max_size=60).map(str.encode),
    sizes=CUTS,
)
def test_a_cut_changes_nothing_whatever_comes(data: bytes, sizes: list[int]) -> None:
    """What is no JSON at all is scanned to the same end in any cut, or refused in all of them."""

    def outcome(pieces: list[bytes]) -> Any:
        scanner = Scanner(KEY)
        try:
            parts = [part for piece in pieces for part in scanner.feed(piece)] + scanner.finish()
        except SampleFailure as error:
            return type(error)
        return [b"".join(part.data for part in parts if (part.kind == "rest") is kept) for kept in (True, False)]

    assert outcome(cut(data, sizes)) == outcome([data] if data else [])


def test_events_are_scanned_like_one_body() -> None:
    """Chunks of a stream: nulls stay, and each value is taken where it stands."""
    events = [
        {"output_ids": [1], "meta_info": {KEY: None}},
        {"output_ids": [2], "meta_info": {KEY: "QUJD"}},
        {"output_ids": [], "meta_info": {"end": True, KEY: [[[3, 4]]]}},
    ]
    body = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"
    rest, values = scanned(cut(body, [3, 5, 7]))
    assert rest == body.replace(b'"QUJD"', b"null").replace(b"[[[3,4]]]", b"null")
    assert values == [("string", b"QUJD"), ("list", b"[[[3,4]]]")]


def test_what_is_neither_string_nor_list_stays() -> None:
    """A key with a number, a word or an object is nobody's to lift, and the word alone is no key."""
    body = b'{"routed_experts" : true, "a": "routed_experts", "b": {"routed_experts":{"routed_experts":"eA=="}}}'
    rest, values = scanned([body])
    assert rest == body.replace(b'"eA=="', b"null")
    assert values == [("string", b"eA==")]


def test_pieces_are_not_copied_where_a_whole_chunk_is_of_the_value() -> None:
    """What comes in the middle of a value is handed on as it is."""
    scanner = Scanner(KEY)
    scanner.feed(b'{"routed_experts":"')
    chunk = b"A" * 100_000
    [part] = scanner.feed(chunk)
    assert part.data is chunk


def test_blanks_without_end_are_refused() -> None:
    """A list that goes on in blanks does not fill the memory."""
    body = b'{"routed_experts":[' + b" ," * 100_000
    with pytest.raises(SampleFailure, match="experts_invalid"):
        scanned(cut(body, [2000]))


def test_a_false_escape_is_refused() -> None:
    """A string that no parser would take is no value."""
    scanner = Scanner(KEY)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        scanner.feed(b'{"routed_experts":"\\x"}')
