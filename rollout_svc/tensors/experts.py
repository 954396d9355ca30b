"""Routed experts: which experts each token went through, as one array, whatever an engine sent.

The array of a sequence of T tokens (prompt and response) is `(T - 1, moe_layers, top_k)`: row t is the routing of the
forward pass of token t, which gave the logits of token t + 1. The last token was sampled and never forwarded.

Forms (what an engine's dialect calls what it got):

| form | of | data |
|---|---|---|
| `npy` | vLLM | the bytes of a `.npy` file: shape and dtype in its header; the layers that have experts |
| `int32` | SGLang | raw little-endian int32, no shape, all hidden layers |
| `array` | LMDeploy | nested lists, read to an array by then; all hidden layers |
| `key` | LMDeploy on Ray | a key to be fetched, once, before it can be decoded |

Invariants:

- Pure. What is returned is whole, in range, and of the one dtype; anything else raises and nothing was changed.
- What is returned owns its bytes: no view keeps an engine's answer alive.
"""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy

from rollout_svc.errors import SampleFailure

__all__ = ["Form", "Layout", "RawExperts", "decode"]

Form = Literal["npy", "int32", "array", "key"]
Experts = np.ndarray[Any, Any]

_NPY_HEAD_BYTES: Final = 4096  # more than the header of three dimensions takes
_SMALL: Final = 256  # experts: as many as a byte can name


class Layout(NamedTuple):
    """What the routing of a model looks like; None where it is not known, and what comes is taken at its word.

    Attributes:
        num_experts: of a layer; the largest id is one less.
        top_k: experts a token goes through in a layer.
        layers: hidden layers of the model, dense ones included.
        moe_layers: indices of those that have experts; None: all.
    """

    num_experts: int | None = None
    top_k: int | None = None
    layers: int | None = None
    moe_layers: tuple[int, ...] | None = None


class RawExperts(NamedTuple):
    """Routed experts as an engine sent them.

    Attributes:
        form: see the module's table.
        data: bytes, an array, or a key.
        start: the token that the first row is of.
    """

    form: Form
    data: Any
    start: int = 0


def decode(raw: RawExperts, layout: Layout, *, tokens: int, held: int = 0, stopped: bool = False) -> Experts:
    """Read what an engine sent, and return the rows that are not held yet.

    Args:
        raw: anything but a `key`.
        layout: of the model.
        tokens: T, prompt and response, this answer's tokens included.
        held: rows of the sequence that are there already.
        stopped: the engine ended at a stop token, whose row it may have kept although the token is not among T.

    Returns:
        `(T - 1 - held, moe_layers, top_k)`, uint8, or uint16 where there are more than 256 experts.

    Raises:
        SampleFailure: `experts_invalid`: shape, range or alignment are not what they have to be.
    """
    rows = _shaped(raw, layout)
    wanted = tokens - 1 - raw.start
    if stopped and len(rows) == wanted + 1:
        rows = rows[:wanted]
    if len(rows) != wanted or not 0 <= raw.start <= held < tokens:
        raise _invalid(f"{len(rows)} rows from token {raw.start} on for {tokens} tokens, of which {held} rows are held")
    rows = rows[held - raw.start :]
    if layout.moe_layers is not None and rows.shape[1] != len(layout.moe_layers):
        rows = rows[:, _indices(layout.moe_layers)]  # the others hold whatever was in memory: nobody looks at it
    lowest, highest = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    limit = layout.num_experts or _limit(raw, rows)
    if lowest < 0 or highest >= limit:
        raise _invalid(f"experts {lowest} to {highest}, where 0 to {limit - 1} are")
    return rows.astype(np.uint8 if limit <= _SMALL else np.uint16, order="C", copy=True)


def _indices(layers: tuple[int, ...]) -> slice | list[int]:
    """Index an axis by these, without a copy where they are a range."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if layers == tuple(range(first, last + 1)) else list(layers)


def _limit(raw: RawExperts, rows: Experts) -> int:
    """How many experts a layer has at most, where nobody said: vLLM's dtype tells whether a byte can name them."""
    return _SMALL if raw.form == "npy" and rows.dtype == np.uint8 else np.iinfo(np.uint16).max + 1


def _shaped(raw: RawExperts, layout: Layout) -> Experts:
    """The rows in three dimensions, dtype and layers as they came."""
    if raw.form == "int32":
        if layout.layers is None or layout.top_k is None:
            raise _invalid("they came without a shape, and experts.layers or experts.top_k is not known")
        row = layout.layers * layout.top_k
        data = memoryview(raw.data)
        if data.nbytes % (4 * row):
            raise _invalid(f"{data.nbytes} bytes are no whole rows of {layout.layers} x {layout.top_k} int32")
        rows = np.frombuffer(data, dtype="<i4").reshape(-1, layout.layers, layout.top_k)
    else:
        rows = _read_npy(raw.data) if raw.form == "npy" else _read_array(raw.data, layout)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":  # noqa: PLR2004 - tokens, layers, experts
        raise _invalid(f"an array of shape {rows.shape} and dtype {rows.dtype}")
    if not _fits(rows.shape[1], layout) or layout.top_k not in (None, rows.shape[2]):
        raise _invalid(f"{rows.shape[1]} layers x {rows.shape[2]} experts a token do not fit the model: {layout}")
    return rows


def _fits(layers: int, layout: Layout) -> bool:
    """Whether an array of so many layers may be of all hidden layers, or of those that have experts."""
    hidden = layout.layers in (None, layers)
    if layout.moe_layers is None:
        return hidden
    return (hidden and layers > max(layout.moe_layers)) or layers == len(layout.moe_layers)


def _read_array(data: Any, layout: Layout) -> Experts:
    """The array, or of lists the one that they are; no rows at all have no shape."""
    try:
        rows = np.asarray(data)
        return (
            rows
            if rows.size
            else np.empty((0, layout.layers or len(layout.moe_layers or ()), layout.top_k or 0), np.uint16)
        )
    except (ValueError, OverflowError) as error:  # lists of several lengths
        raise _invalid(f"no array: {error}") from error


def _read_npy(data: Any) -> Experts:
    """The array of a `.npy` file, where it lies; never a pickle."""
    view = memoryview(data).cast("B")
    file = BytesIO(view[:_NPY_HEAD_BYTES])
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:  # a header is Python source that NumPy parses: whatever its parser raises
        raise _invalid(f"not an array in npy format: {type(error).__name__}: {error}") from error
    body = view[file.tell() :]
    if dtype.kind not in "iu" or min(shape, default=0) < 0 or body.nbytes != dtype.itemsize * math.prod(shape):
        raise _invalid(f"{body.nbytes} bytes after a header that says {shape} of {dtype}")
    rows = np.frombuffer(body, dtype=dtype) if body.nbytes else np.empty(0, dtype)
    return rows.reshape(shape, order="F" if fortran else "C")


def _invalid(what: str) -> SampleFailure:
    return SampleFailure("experts_invalid", f"routed experts: {what}")
