"""A checkpoint beside what is known of its model's tensors: what is missing is told, and only what is certain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_svc.weights.checkpoint import tensors_of
from rollout_svc.weights.names import Kind
from rollout_svc.weights.reference import Reference

WHOLE: dict[str, Any] = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}


def checkpoint(
    folder: Path, tensors: dict[str, Any], name: str = "model.safetensors", *, ties: bool | None = None
) -> str:
    """Write one."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    if ties is not None:
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": ties}))
    return str(folder)


def told(base: str, path: str) -> list[str]:
    """What is said of a checkpoint by whoever serves another, but for the first line."""
    return Reference().check(path, [base]).problems[1:]


def without(name: str) -> dict[str, Any]:
    """All but one."""
    return {key: tensor for key, tensor in WHOLE.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "lines"),
    [
        (WHOLE, []),
        (without("a"), ["missing a"]),
        ({**WHOLE, "c": np.zeros(1)}, ["unknown c"]),
        ({**WHOLE, "a": np.zeros((3, 2), np.float32)}, ["a: [3, 2] in place of [2, 3]"]),
        ({**WHOLE, "a": WHOLE["a"].astype(np.float16)}, []),
        ({"c": np.zeros(1), **without("b")}, ["missing b", "unknown c"]),
    ],
)
def test_differences_are_told_by_name(tensors: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    """P24 P35: what is missing, unknown or of another shape; another dtype is the engine's to cast."""
    base, new = checkpoint(tmp_path / "base", WHOLE), checkpoint(tmp_path / "new", tensors)
    problems = Reference().check(new, [base]).problems
    assert problems[1:] == lines
    if lines:
        assert base in problems[0]
        assert "`check_names: false`" in problems[0]


def test_what_is_not_known_is_not_told(tmp_path: Path) -> None:
    """P35: no folder of an engine here, a name, another format, a header that cannot be read."""
    new = checkpoint(tmp_path / "new", WHOLE)
    other, broken = tmp_path / "other", tmp_path / "broken"
    other.mkdir()
    (other / "pytorch_model.bin").write_bytes(b"?")
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"?")
    assert Reference().check(new, ["tiny", "/nowhere/model", str(other), str(broken)]).problems == []
    for path in (str(other), "tiny", "/nowhere/model"):
        found = Reference().check(path, [new])
        assert (found.tensors, found.problems) == (None, [])


def test_the_last_update_is_what_the_next_is_compared_with(tmp_path: Path) -> None:
    """P24: before what an engine serves, also where its files are deleted; unknown contents change nothing."""
    base, first = checkpoint(tmp_path / "base", WHOLE), checkpoint(tmp_path / "first", without("b"))
    reference = Reference()
    assert reference.check(first, [base]).problems[1:] == ["missing b"]
    reference.keep(reference.check(first, [base]))  # it was meant
    (tmp_path / "first" / "model.safetensors").unlink()
    reference.keep(reference.check(first, [base]))  # nothing to be seen there any more
    reference.keep(None)
    assert reference.check(base, [base]).problems[1:] == ["unknown b"]


@pytest.mark.parametrize("tied", [0, 1])
def test_output_weights_that_are_tied_may_be_there_or_not(tied: int, tmp_path: Path) -> None:
    """P35: trainers save what the model's own checkpoint leaves out; either folder may say that they are tied."""
    more = {**WHOLE, "lm_head.weight": np.zeros(3), "layers.0.rotary_emb.inv_freq": np.zeros(2)}
    base = checkpoint(tmp_path / "base", WHOLE, ties=tied == 0)
    new = checkpoint(tmp_path / "new", more, ties=tied == 1)
    assert told(base, new) == told(new, base) == []
    for folder in (base, new):
        (Path(folder) / "config.json").write_text("[]")
    assert told(base, new) == ["unknown lm_head.weight"]
    assert told(new, base) == ["missing lm_head.weight"]


def test_only_files_that_engines_load_are_counted(tmp_path: Path) -> None:
    """P35: those of the index; the same weights in their makers' names are beside them in many a folder."""
    folder = tmp_path / "both"
    checkpoint(folder, {"a": WHOLE["a"]}, "model-1.safetensors")
    checkpoint(folder, {"b": WHOLE["b"], "left": np.zeros(1)}, "model-2.safetensors")
    checkpoint(folder, {"wa": WHOLE["a"]}, "consolidated.safetensors")
    wanted = {"a": Kind((2, 3), "F32"), "b": Kind((4,), "F16")}
    assert tensors_of(str(folder)) == {**wanted, "left": Kind((1,), "F64")}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert tensors_of(str(folder)) == wanted
    assert tensors_of(str(folder / "model-1.safetensors")) == {"a": wanted["a"]}
    only = checkpoint(tmp_path / "only", {"wa": WHOLE["a"]}, "consolidated.safetensors")
    assert tensors_of(only) == {"wa": wanted["a"]}
    index.write_text("{")
    assert tensors_of(str(folder)) is None
