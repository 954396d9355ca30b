"""Weights on disk, looked at before anybody is told to load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from rollout_svc.weights import checkpoint
from rollout_svc.weights.checkpoint import capped, problems_of

TENSORS: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, dtype=np.float16)}


def sound(folder: Path) -> Path:
    """Write two shards and their index."""
    folder.mkdir(exist_ok=True)
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_what_is_whole_passes(tmp_path: Path) -> None:
    """P35: shards, one file, and folders of a format that is not ours to judge."""
    assert problems_of(str(sound(tmp_path / "step-1")), finite=True) == []
    assert problems_of(str(tmp_path / "step-1" / "one.safetensors"), finite=True) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"?")
    assert problems_of(str(tmp_path / "other")) == []


@pytest.mark.parametrize("path", ["org/model", "/somewhere-else/step-1", "/somewhere-else", "v1"])
def test_what_only_the_engines_can_see_is_theirs_to_judge(path: str) -> None:
    """P35: a name of a hub, or a folder of another machine, is no problem; that its values are checked is refused."""
    assert problems_of(path) == []
    [told] = problems_of(path, finite=True)
    assert "is not to be seen from here" in told


def test_a_path_that_is_certainly_nowhere(tmp_path: Path) -> None:
    """P35: its folder is here and has others; one that is empty may be a disk that the engines have mounted."""
    assert problems_of(str(tmp_path / "step-1")) == []
    sound(tmp_path / "step-2")
    assert problems_of(str(tmp_path / "step-1")) == [f"there is no 'step-1' in {str(tmp_path)!r}"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (("config.json", "vocab.txt"), "it has no weights, only config.json, vocab.txt"),
        (
            ("config.json", "model-00001-of-00003.bin", "model-00002-of-00003.bin"),
            "2 of 3 shards model-…-of-00003.bin are there, and no index",
        ),
        (("x-0-of-2.safetensors",), "1 of 2 shards x-…-of-2.safetensors are there, and no index"),
    ],
)
def test_what_a_writer_has_only_begun(written: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """P35: whole files, but not all of them: settings are written first, then one shard after the other."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in written:
        save_file(TENSORS, folder / name)
    assert problems_of(str(folder)) == [told]


def test_what_is_no_beginning(tmp_path: Path) -> None:
    """All shards of a number, shards that an index leaves out, a folder of folders: nothing is known against them."""
    folder = sound(tmp_path / "step-1")
    save_file(TENSORS, folder / "model-00002-of-00004.safetensors")
    assert problems_of(str(folder)) == []
    other = tmp_path / "step-2"
    other.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file(TENSORS, other / name)
    assert problems_of(str(other)) == []
    assert problems_of(str(tmp_path)) == []


@settings(max_examples=30)
@given(cut=st.integers(1, 400))
def test_a_file_that_is_cut_anywhere_is_told(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """P35: whatever a writer left of a file that it did not end, in the header or behind it."""
    whole = save(TENSORS)
    folder = tmp_path_factory.mktemp("cut")
    (folder / "model.safetensors").write_bytes(whole[: max(len(whole) - cut, 0)])
    [told] = problems_of(str(folder))
    assert told.startswith("model.safetensors: ")


@settings(max_examples=30)
@given(text=st.binary(max_size=60))
def test_a_header_of_anything_is_told_and_never_raises(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """P35: whatever bytes stand for a header."""
    folder = tmp_path_factory.mktemp("header")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert all(told.startswith("model.safetensors: ") for told in problems_of(str(folder)))


@pytest.mark.parametrize(
    "entry",
    [{}, [], {"dtype": "F32", "data_offsets": []}, {"dtype": "F32", "data_offsets": [8, 4]}, {"data_offsets": [0, 4]}],
)
def test_an_entry_of_anything_is_told(entry: Any, tmp_path: Path) -> None:
    """P35: JSON that is no header."""
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert len(problems_of(str(tmp_path))) == 1


def test_all_that_is_wrong_is_listed(tmp_path: Path) -> None:
    """P35: a shard that is not there, one that is cut, a name nobody has, and what a writer left, in one answer."""
    folder = sound(tmp_path / "step-1")
    index = {
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors", "d": "two.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").write_bytes(b"1234567")
    (folder / "four.safetensors.incomplete").touch()
    (tmp_path / "step-1.tmp").mkdir()
    assert problems_of(str(folder)) == [
        f"{tmp_path / 'step-1.tmp'} is still there: it is being written, or was never ended",
        "four.safetensors.incomplete is still there: it is being written, or was never ended",
        "one.safetensors: it has 7 bytes, and no header",
        "model.safetensors.index.json names three.safetensors, which is not there",
        "model.safetensors.index.json has d in two.safetensors, which has none",
    ]
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "it cannot be read" in problems_of(str(folder))[-1]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 700, 1023])
def test_not_a_number_is_named(
    dtype: Any, value: float, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P35: wherever it is in a tensor that is read piece by piece, and only on request."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1000)
    bad = np.linspace(-6e4, 6e4, 1024).astype(dtype)
    save_file({"good": bad.copy(), "whole": np.full(9, -1)}, tmp_path / "good.safetensors")
    bad[place] = value
    save_file({"bad": bad}, tmp_path / "bad.safetensors")
    assert problems_of(str(tmp_path)) == []
    assert problems_of(str(tmp_path), finite=True) == ["bad in bad.safetensors has values that are not finite"]


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "BF16"), ("float8_e5m2", "F8_E5M2"), ("float8_e4m3fn", "F8_E4M3")]
)
def test_narrow_kinds_are_looked_through_as_torch_does(dtype: str, name: str, tmp_path: Path) -> None:
    """P35: every pattern of bits is finite here exactly where it is in torch."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    patterns = torch.arange(256 if kind.itemsize == 1 else 65536).to(
        torch.uint8 if kind.itemsize == 1 else torch.uint16
    )
    values = patterns.view(kind)
    good = patterns[torch.isfinite(values.float())]
    code, mask = checkpoint._EXPONENTS[name]
    told = {int(one) for one in patterns.numpy() if int(one) & mask != mask}
    assert told == set(good.tolist())
    assert np.dtype(code).itemsize == kind.itemsize


def test_it_is_given_up_when_nobody_waits(tmp_path: Path) -> None:
    """P14: nothing more is read once whoever asked has left."""
    save_file({"bad": np.full(4, np.nan)}, tmp_path / "bad.safetensors")
    asked = iter([False])  # the header is read, and then whoever asked leaves
    assert problems_of(str(tmp_path), finite=True, stopped=lambda: next(asked, True)) == []


@given(count=st.integers(0, 60), length=st.integers(0, 900))
def test_a_list_is_capped(count: int, length: int) -> None:
    """P35: a thousand problems are an answer that can be read, and none is hidden."""
    told = capped(["x" * length] * count)
    assert len(told) <= 21
    assert all(len(words) <= 300 for words in told)
    assert (told[-1] == f"and {count - 20} more") if count > 20 else len(told) == count
