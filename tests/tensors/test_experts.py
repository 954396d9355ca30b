"""Routed experts are read from whatever an engine sends, or refused: whole, in range, aligned, of one dtype."""  # P27

import base64
import io
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.errors import SampleFailure
from rollout_svc.tensors.experts import Form, Layout, RawExperts, decode
from tests.support.routing import TINY, Routing

FORMS: tuple[Form, ...] = ("npy", "int32", "array")


def sent(form: Form, routing: Routing, tokens: list[int], start: int = 0) -> RawExperts:
    """What an engine that sends this form answers, lifted from its body; LMDeploy sends all rows."""
    if form == "int32":
        return RawExperts(form, base64.b64decode(routing.int32(tokens, start)), start)
    if form == "npy":
        return RawExperts(form, memoryview(bytearray(base64.b64decode(routing.npy(tokens, start)))), start)
    return RawExperts(form, np.asarray(routing.numbers(tokens)))


def saved(array: Any, **options: Any) -> bytes:
    """A `.npy` file."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Draw any model."""
    layers = draw(st.integers(1, 6))
    moe = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    top_k = draw(st.integers(1, 4))
    return Routing(draw(st.sampled_from([top_k, 64, 255, 256, 257, 60000])), top_k, layers, tuple(sorted(moe)))


@given(
    routing=routings(),
    form=st.sampled_from(FORMS),
    tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
    data=st.data(),
)
def test_round_trip(routing: Routing, form: Form, tokens: list[int], data: st.DataObject) -> None:
    """Whatever the model, the encoding and the rows that are held already: what comes out is what went in."""
    held = data.draw(st.integers(0, len(tokens) - 1))
    start = data.draw(st.integers(0, held))
    rows = decode(sent(form, routing, tokens, start), routing.layout, tokens=len(tokens), held=held)
    assert rows.tolist() == routing.rows(tokens)[held:].tolist()
    assert rows.shape == (len(tokens) - 1 - held, len(routing.moe_layers), routing.top_k)
    assert rows.dtype == (np.uint8 if routing.num_experts <= 256 else np.uint16)
    assert rows.flags.owndata
    assert rows.flags.c_contiguous
    assert rows.flags.writeable


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_a_byte_names_256_experts(form: Form, experts: int, dtype: Any) -> None:
    """The last id that fits a byte is the last of 256 experts."""
    routing = Routing(experts, 1, 1, (0,))
    token = next(token for token in range(experts) if routing.rows([token, 0])[0, 0, 0] == experts - 1)
    rows = decode(sent(form, routing, [token, 0]), routing.layout, tokens=2)
    assert (rows.dtype, rows.item()) == (dtype, experts - 1)


@pytest.mark.parametrize("form", ["int32", "array"])
def test_what_dense_layers_hold_is_never_looked_at(form: Form) -> None:
    """Of layers without experts memory is sent that nobody wrote: it fails no check of the range."""
    garbage = np.full((2, 4, 2), -7, dtype="<i4")
    garbage[:, [1, 3]] = 5
    raw = RawExperts(form, garbage.tobytes() if form == "int32" else garbage)
    assert decode(raw, Layout(8, 2, 4, (1, 3)), tokens=3).tolist() == [[[5, 5], [5, 5]]] * 2
    assert decode(raw, Layout(8, 2, 4, (3,)), tokens=3).tolist() == [[[5, 5]]] * 2
    with pytest.raises(SampleFailure, match=r"experts_invalid.*experts -7 to 5, where 0 to 7 are"):
        decode(raw, Layout(8, 2, 4), tokens=3)


def test_layers_that_have_experts_are_found_where_nobody_says_how_many_there_are() -> None:
    """An array of all hidden layers and one of those with experts are told apart, as far as they differ."""
    layout = Layout(8, 2, None, TINY.moe_layers)
    tokens = [3, 1, 4, 1, 5]
    for raw in (sent("npy", TINY, tokens), sent("array", TINY, tokens)):
        assert decode(raw, layout, tokens=5).tolist() == TINY.rows(tokens).tolist()
    with pytest.raises(SampleFailure, match="2 layers x 2 experts a token do not fit"):
        decode(RawExperts("array", np.zeros((4, 2, 2), dtype=int)), layout, tokens=5)


@pytest.mark.parametrize("form", FORMS)
def test_a_kept_row_of_a_dropped_stop_token_is_cut_off(form: Form) -> None:
    """An engine that leaves its stop token out of the ids may leave its row in, and only where it stopped."""
    tokens = [3, 1, 4, 1, 5]
    kept = sent(form, TINY, [*tokens, 9])
    assert decode(kept, TINY.layout, tokens=5, stopped=True).tolist() == TINY.rows(tokens).tolist()
    assert decode(sent(form, TINY, tokens), TINY.layout, tokens=5, stopped=True).tolist() == TINY.rows(tokens).tolist()
    with pytest.raises(SampleFailure, match="5 rows from token 0 on for 5 tokens"):
        decode(kept, TINY.layout, tokens=5)
    with pytest.raises(SampleFailure, match="6 rows from token 0 on for 5 tokens"):
        decode(sent(form, TINY, [*tokens, 9, 9]), TINY.layout, tokens=5, stopped=True)


@pytest.mark.parametrize("form", FORMS)
def test_holes_are_refused(form: Form) -> None:
    """Rows that begin behind those that are held, or that are too few, would be of other tokens than they say."""
    tokens = [3, 1, 4, 1, 5]
    raw = sent(form, TINY, tokens)._replace(start=0)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(raw._replace(start=3), TINY.layout, tokens=8, held=2)
    with pytest.raises(SampleFailure, match="4 rows from token 0 on for 6 tokens, of which 2 rows are held"):
        decode(raw, TINY.layout, tokens=6, held=2)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(raw, TINY.layout, tokens=5, held=5)


@pytest.mark.parametrize(
    "layout", [Layout(8, 2, 5), Layout(8, 3, 4), Layout(8, 2, 5, (1, 2)), Layout(4, 2, 4, (1, 2, 3))]
)
@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_the_model_is_refused(form: Form, layout: Layout) -> None:
    """Another number of layers, of experts a token, or an expert that is not there."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(sent(form, TINY, [3, 1, 4, 1, 5]), layout, tokens=5)


def test_raw_numbers_without_a_shape_need_the_model() -> None:
    """SGLang sends no shape: without layers and top_k nothing can be read, and no byte may be left over."""
    raw = sent("int32", TINY, [3, 1, 4])
    for layout in (Layout(8, 2), Layout(8, None, 4), Layout()):
        with pytest.raises(SampleFailure, match=r"experts\.layers or experts\.top_k is not known"):
            decode(raw, layout, tokens=3)
    with pytest.raises(SampleFailure, match="61 bytes are no whole rows of 4 x 2 int32"):
        decode(RawExperts("int32", raw.data[:61]), TINY.layout, tokens=3)


def test_where_the_model_is_not_known_an_array_is_taken_at_its_word() -> None:
    """The dtype of vLLM tells how many experts there are at most; else two bytes name them all."""
    tokens = [3, 1, 4, 1, 5]
    assert decode(sent("npy", TINY, tokens), Layout(), tokens=5).dtype == np.uint8
    assert decode(RawExperts("array", TINY.rows(tokens)), Layout(), tokens=5).dtype == np.uint16
    with pytest.raises(SampleFailure, match="65536, where 0 to 65535 are"):
        decode(RawExperts("array", np.full((4, 1, 1), 65536)), Layout(), tokens=5)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2", np.int64])
def test_npy_in_any_order_of_its_bytes(dtype: Any, order: Any) -> None:
    """Byte order and index order are in the header."""
    rows = np.asarray(TINY.rows([3, 1, 4, 1, 5]).astype(dtype), order=order)
    raw = RawExperts("npy", saved(rows))
    assert decode(raw, TINY.layout, tokens=5).tolist() == rows.tolist()


def test_no_pickle_is_read() -> None:
    """P34: an array of objects is a pickle in a `.npy`; what it would run does not run."""
    trap = np.empty((4, 3, 2), dtype=object)
    trap[:] = _Trap()
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("npy", saved(trap, allow_pickle=True)), TINY.layout, tokens=5)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("npy", pickle.dumps(_Trap())), TINY.layout, tokens=5)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("array", trap), TINY.layout, tokens=5)


class _Trap:
    """Blows up when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize(
    "array", [np.zeros((4, 6)), np.zeros((4, 3, 2)), np.zeros((4, 3, 2), dtype=bool), np.zeros(4, dtype="V8,i4")]
)
def test_other_arrays_are_refused(array: Any) -> None:
    """Three dimensions of integers, or nothing."""
    for raw in (RawExperts("npy", saved(array)), RawExperts("array", array)):
        with pytest.raises(SampleFailure, match="experts_invalid"):
            decode(raw, TINY.layout, tokens=5)


def test_ragged_lists_are_refused() -> None:
    """Rows of several lengths are no array."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("array", [[[1, 2], [3]]]), Layout(), tokens=2)


GOOD = saved(TINY.rows([3, 1, 4, 1, 5]).astype(np.uint8))


@given(cut=st.integers(0, len(GOOD) - 1))
def test_a_truncated_file_is_refused(cut: int) -> None:
    """Wherever it ends too early."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("npy", GOOD[:cut]), TINY.layout, tokens=5)


@given(
    header=st.one_of(
        st.binary(max_size=200),
        st.text(alphabet="{}()[]'\":,-0123456789descrfortan_hpi<>uOVTFals \n#\\", max_size=200).map(str.encode),
        st.sampled_from([b"-" * 3000 + b"1", b"(" * 3000, b"{'descr': '<u1', 'fortran_order': False, 'shape': (-4,)}"]),
    ),
    version=st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"]),
    body=st.binary(max_size=30),
)
def test_a_header_of_any_bytes_is_refused_or_read(header: bytes, version: bytes, body: bytes) -> None:
    """P34: NumPy parses a header as Python source: nothing but a failure of the sample comes of one that is none."""
    size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    with pytest.raises(SampleFailure, match="experts_invalid"):
        decode(RawExperts("npy", b"\x93NUMPY" + version + size + header + body), TINY.layout, tokens=5)


def test_nothing_that_is_returned_keeps_an_answer_alive() -> None:
    """P27: the engine's bytes go when the answer goes."""
    answer = bytearray(base64.b64decode(TINY.int32([3, 1, 4])))
    rows = decode(RawExperts("int32", answer), TINY.layout, tokens=3)
    answer.extend(b"no view is left that would forbid this")
    assert rows.tolist() == TINY.rows([3, 1, 4]).tolist()
