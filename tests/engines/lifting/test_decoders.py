"""Both decoders give, piece by piece, what decoding the whole would, or a typed failure."""

import base64
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_svc.engines.lifting import Base64, Numbers
from rollout_svc.errors import SampleFailure
from tests.engines.lifting.test_scanner import CUTS, cut

AMPLE = 1 << 20


def read_numbers(text: bytes, sizes: list[int], max_bytes: int = AMPLE, expected: int = 0) -> np.ndarray[Any, Any]:
    numbers = Numbers(max_bytes, expected)
    for piece in cut(text, sizes):
        numbers.feed(piece)
    return numbers.finish()


def read_base64(text: bytes, sizes: list[int], max_bytes: int = AMPLE, expected: int = 0) -> bytes:
    decoder = Base64(max_bytes, expected)
    for piece in cut(text, sizes):
        decoder.feed(piece)
    return bytes(decoder.finish())


@st.composite
def arrays(draw: st.DrawFn) -> list[list[list[int]]]:
    rows, layers, top_k = (draw(st.integers(1, 4)) for _ in range(3))
    number = st.integers(0, 65_535) | st.sampled_from([0, 9, 10, 99, 100, 255, 256, 9_999, 10_000, 65_535])
    row = st.lists(st.lists(number, min_size=top_k, max_size=top_k), min_size=layers, max_size=layers)
    return draw(st.lists(row, min_size=rows, max_size=rows))


@given(value=arrays(), style=st.sampled_from([(",", ":"), (", ", ": "), (" \n,\t", ":")]), sizes=CUTS)
def test_nested_lists(value: list[list[list[int]]], style: tuple[str, str], sizes: list[int]) -> None:
    """Any regular list in any cut and any spacing is the array it says."""
    found = read_numbers(json.dumps(value, separators=style).encode(), sizes)
    assert found.dtype == np.uint16
    assert found.shape == np.shape(value)
    assert found.tolist() == value
    assert not found.flags.writeable


def irregular(value: Any) -> bool:
    """Whether that is no list of lists of lists of integers from 0 to 65,535, all as long as their siblings."""
    try:
        array = np.array(value)
    except ValueError:
        return True
    if array.ndim != 3 or array.size == 0 or array.dtype.kind != "i":
        return bool(value != [])
    whole = all(type(number) is int for row in value for layer in row for number in layer)
    return not whole or bool(array.min() < 0) or bool(array.max() > 65_535)


@given(
    value=st.recursive(
        st.integers(-1, 70_000) | st.none() | st.booleans() | st.floats(0, 9), lambda of: st.lists(of, max_size=3)
    ).filter(lambda value: isinstance(value, list)),
    sizes=CUTS,
)
@example(value=[[[1, 2], [3, 4]], [[5, 6]]], sizes=[1])
@example(value=[[[1, 2], [3, 4]], [[5, 6], [7]]], sizes=[100])
@example(value=[[[1]], [[2]], [3]], sizes=[2])
@example(value=[[[1]], [[[2]]]], sizes=[2])
@example(value=[[[1e3]]], sizes=[100])
@example(value=[[[65_535]], [[65_536]]], sizes=[100])
@example(value=[[[10_000_001]]], sizes=[100])
def test_what_is_no_array_is_refused(value: list[Any], sizes: list[int]) -> None:
    """Ragged, too deep, not deep enough, fractions, signs, words, too large: a failure of the sample, in any cut."""
    text = json.dumps(value).encode()
    if irregular(value):
        with pytest.raises(SampleFailure, match="experts_invalid"):
            read_numbers(text, sizes)
    else:
        assert read_numbers(text, sizes).tolist() == value


@given(value=arrays(), place=st.integers(0, 10**6), byte=st.sampled_from(b'[],- .0123e"x'), sizes=CUTS)
def test_one_wrong_byte_never_goes_unseen(value: Any, place: int, byte: int, sizes: list[int]) -> None:
    """Whatever is read is what a parser reads, leading zeros aside; where it reads nothing, nothing is read."""
    text = bytearray(json.dumps(value).encode())
    text[place % len(text)] = byte
    try:
        wanted = json.loads(text)
    except json.JSONDecodeError:
        wanted = None
    try:
        found = read_numbers(bytes(text), sizes).tolist()
    except SampleFailure:
        assert wanted is None or irregular(wanted) or b"-0" in text
    else:
        assert found == wanted or (wanted is None and re.search(rb"(?<!\d)0\d", text))


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b"[]]", b"[[[1],[2]],[[3]]", b"[[[1]]", b"[[[1]],", b"[[[1]]]]", b"[[[1]]],1", b"[[[" + b"0" * 9],
)
def test_what_ends_early_or_late_is_refused(text: bytes) -> None:
    """Half a list, and more than a list."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        read_numbers(text, [1000])


def test_a_row_that_never_ends_is_refused() -> None:
    """What lies between the numbers is kept until the first row ends: not without a bound."""
    with pytest.raises(SampleFailure, match="no row ends"):
        read_numbers(b"[[[" + b"1," * 2_000_000, [100_000], max_bytes=1 << 30)


def test_larger_than_its_slices() -> None:
    """Rows run over the slices that are looked at in one step."""
    value = np.random.default_rng(0).integers(0, 65_536, (3000, 7, 8)).tolist()
    assert read_numbers(json.dumps(value).encode(), [1 << 20]).tolist() == value


def test_an_empty_list_is_no_rows() -> None:
    """One token has no row."""
    assert read_numbers(b"[]", [1]).shape == (0, 0, 0)


@given(value=st.binary(max_size=300), sizes=CUTS, expected=st.integers(0, 400))
def test_base64(value: bytes, sizes: list[int], expected: int) -> None:
    """Any bytes in any cut come back, whether their number was known or not."""
    assert read_base64(base64.b64encode(value), sizes, expected=expected) == value


@given(text=st.text(alphabet="ABab01+/=-_ \n", max_size=24).map(str.encode), sizes=CUTS)
@example(text=b"AA==AA==", sizes=[3])
@example(text=b"AA==AA==", sizes=[100])
def test_what_is_no_base64_is_refused(text: bytes, sizes: list[int]) -> None:
    """Another alphabet, blanks, padding within, a group that is not whole: in any cut as in one piece."""
    try:
        wanted = base64.b64decode(text, validate=True)
    except ValueError:
        with pytest.raises(SampleFailure, match="experts_invalid"):
            read_base64(text, sizes)
    else:
        assert read_base64(text, sizes) == wanted


def test_bytes_are_counted_before_they_are_kept() -> None:
    """What fits to the byte is read, one byte more is refused, by both."""
    text = base64.b64encode(bytes(100_000))
    assert len(read_base64(text, [999], max_bytes=100_000)) == 100_000
    with pytest.raises(SampleFailure, match="experts_too_large"):
        read_base64(text, [999], max_bytes=99_999)
    lists = json.dumps([[[1, 2]]] * 10_000).encode()
    assert read_numbers(lists, [999], max_bytes=40_000).nbytes == 40_000
    with pytest.raises(SampleFailure, match="experts_too_large"):
        read_numbers(lists, [999], max_bytes=39_999, expected=10**15)
