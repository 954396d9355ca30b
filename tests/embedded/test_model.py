"""The transformer and its files."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_svc.embedded.model import (
    PRESETS,
    TinyConfig,
    TinyTransformer,
    WeightsError,
    build,
    load_weights,
    preset,
    read_weights,
    save_weights,
)
from tests.chaos.leaks import resident_bytes

SHAPE = TinyConfig(vocab_size=16, width=8, layers=1, heads=2, context=12)


def weights_of(model: TinyTransformer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_default_shape_has_about_107k_parameters() -> None:
    """The default shape is the size that it says it is."""
    count = sum(parameter.numel() for parameter in build(TinyConfig(), 0).parameters())
    assert 105_000 < count < 110_000


def test_build_depends_on_the_seed_alone() -> None:
    """One seed gives one model, another seed another, and the global random state is left alone."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build(SHAPE, 1)
    assert torch.equal(torch.rand(3), expected)
    assert_same(weights_of(first), weights_of(build(SHAPE, 1)))
    assert not torch.equal(first.head.weight, build(SHAPE, 2).head.weight)


def test_a_fresh_policy_is_near_uniform() -> None:
    """No token of a fresh model is much likelier than any other."""
    chances = torch.softmax(build(TinyConfig(), 0)(torch.randint(32, (4, 10))), dim=-1)
    assert chances.max() < 3 / 32
    assert chances.min() > 1 / 32 / 3


def test_padding_on_the_right_is_never_seen() -> None:
    """Logits of a row do not depend on what follows it in the tensor."""
    model = build(SHAPE, 0)
    row = torch.randint(16, (1, 5))
    padded = torch.cat([row, torch.randint(16, (1, 7))], dim=1)
    torch.testing.assert_close(model(padded)[:, :5], model(row))


@pytest.mark.parametrize("as_directory", [False, True])
def test_weights_survive_a_file(tmp_path: Path, *, as_directory: bool) -> None:
    """What is saved is what is loaded, into the same parameter tensors; no partial file stays."""
    source, target = build(SHAPE, 1), build(SHAPE, 2)
    path = tmp_path if as_directory else tmp_path / "w.safetensors"
    parameter = target.head.weight
    save_weights(source, path)
    load_weights(target, path)
    assert_same(weights_of(source), weights_of(target))
    assert target.head.weight is parameter
    assert len(list(tmp_path.iterdir())) == 1


def test_reading_weights_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    """An engine reads a file at every update of its life."""
    model = build(SHAPE, 1)
    save_weights(model, tmp_path)

    def read(times: int) -> int:
        for _ in range(times):
            read_weights(model, tmp_path)
        gc.collect()
        return resident_bytes()

    before = read(500)
    assert read(4000) - before < 2**20  # a name of each tensor left behind would be four times as much


def broken_file(tmp_path: Path, fault: str) -> Path:
    """A weights file with one fault."""
    path = tmp_path / "broken.safetensors"
    tensors = weights_of(build(SHAPE, 1))
    if fault == "missing name":
        del tensors["head.weight"]
    elif fault == "unknown name":
        tensors["extra"] = torch.zeros(1)
    elif fault == "shape":
        tensors["head.weight"] = torch.zeros(3, 3)
    elif fault == "dtype":
        tensors["head.weight"] = tensors["head.weight"].half()
    if fault == "garbage":
        path.write_bytes(b"\x07" * 64)
    elif fault == "truncated":
        save_file(tensors, path)
        path.write_bytes(path.read_bytes()[:-8])
    elif fault != "absent":
        save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing name", "missing head.weight"),
        ("unknown name", "unknown extra"),
        ("shape", r"head.weight has shape \[3, 3\], expected \[16, 8\]"),
        ("dtype", "head.weight has dtype torch.float16"),
        ("garbage", "cannot read"),
        ("truncated", "cannot read"),
        ("absent", "no weights at"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, fault: str, words: str) -> None:
    """A bad file is refused by name, and every weight is as it was."""
    model = build(SHAPE, 2)
    before = weights_of(model)
    with pytest.raises(WeightsError, match=words):
        load_weights(model, broken_file(tmp_path, fault))
    assert_same(weights_of(model), before)


def test_presets_take_other_vocabularies_and_contexts() -> None:
    """A preset's vocabulary and context give way; an unknown name is refused with those that exist."""
    assert preset("tiny") == PRESETS["tiny"]
    assert preset("tiny", vocab_size=32, context=64) == TinyConfig()
    with pytest.raises(ValueError, match=r"unknown model 'huge', expected one of: tiny, tiny-moe, wide"):
        preset("huge")


def test_wide_has_a_gibibyte_of_weights() -> None:
    """Sizes alone: nothing is allocated. No tensor is so large that buckets of it would be few."""
    with torch.device("meta"):
        sizes = [parameter.nbytes for parameter in TinyTransformer(PRESETS["wide"]).parameters()]
    assert 2**30 <= sum(sizes) < 1.01 * 2**30
    assert max(sizes) < 2**30 // 8


@pytest.mark.parametrize("fields", [{"heads": 3}, {"vocab_size": 0}, {"context": 0}, {"layers": -1}])
def test_shapes_that_cannot_be_built_are_refused(fields: dict[str, Any]) -> None:
    """A shape that makes no model is refused when it is named."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        TinyConfig(**fields)


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    """P35: missing, unknown, of another shape and of another dtype, in one refusal."""
    model = build(SHAPE, 0)
    tensors = weights_of(model)
    missing, shape, dtype = sorted(tensors)[:3]
    del tensors[missing]
    tensors |= {"extra": torch.zeros(2), shape: torch.zeros(1), dtype: tensors[dtype].double()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as refused:
        load_weights(model, tmp_path)
    told = str(refused.value)
    assert all(words in told for words in (f"missing {missing}", "unknown extra", f"{shape} has shape [1]"))
    assert f"{dtype} has dtype torch.float64" in told
