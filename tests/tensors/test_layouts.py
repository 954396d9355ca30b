"""What a model's own config says of its routing, in the words of those who publish them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.tensors.experts import Layout
from rollout_svc.tensors.layouts import differences, filled, layout_of, layout_said, read_layout

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_DENSE: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (QWEN3_30B, Layout(128, 8, 48, tuple(range(48)))),
        (DEEPSEEK_V3, Layout(256, 8, 61, tuple(range(3, 61)))),
        (MIXTRAL, Layout(8, 2, 32, tuple(range(32)))),
        (QWEN3_30B | {"num_hidden_layers": 4, "mlp_only_layers": [0, 3]}, Layout(128, 8, 4, (1, 2))),
        (QWEN3_30B | {"num_hidden_layers": 6, "decoder_sparse_step": 2}, Layout(128, 8, 6, (1, 3, 5))),
        (DEEPSEEK_V3 | {"num_hidden_layers": 8, "moe_layer_freq": 2}, Layout(256, 8, 8, (4, 6))),
        (DEEPSEEK_V3 | {"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}, Layout(256, 8, 3, (1, 2))),
        ({"model_type": "qwen3_vl_moe", "text_config": QWEN3_30B}, Layout(128, 8, 48, tuple(range(48)))),
        ({"num_experts": 4}, Layout(num_experts=4)),
        (QWEN3_DENSE, None),
        ({}, None),
        ({"num_experts": 0, "num_hidden_layers": 3}, None),
        ({"num_experts": "many", "n_routed_experts": True}, None),
    ],
)
def test_layout_of_public_configs(config: dict[str, Any], layout: Layout | None) -> None:
    """Qwen, DeepSeek and Mixtral name the same things differently; a dense model has no routing."""
    assert layout_of(config) == layout


def test_a_config_is_read_where_the_model_lies(tmp_path: Path) -> None:
    """Only from a folder that is named in full; what cannot be read says nothing."""
    path = tmp_path / "config.json"
    assert read_layout(str(tmp_path)) is None
    path.write_text(json.dumps(MIXTRAL))
    assert read_layout(str(tmp_path)) == layout_of(MIXTRAL)
    for broken in ("[1]", "{", "\xff", " " * 2**20 + json.dumps(MIXTRAL)):
        path.write_text(broken, encoding="latin-1")
        assert read_layout(str(tmp_path)) is None
    assert read_layout("tiny-model") is None
    assert read_layout("\0") is None


def test_a_name_is_no_folder_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model called as a folder beside us is not that folder."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(MIXTRAL))
    monkeypatch.chdir(tmp_path)
    assert read_layout("tiny") is None


def test_two_who_know() -> None:
    """What one does not say the other may; where both speak they say the same, or it is named."""
    ours, theirs = Layout(8, None, 4), Layout(8, 2, 5, (1,))
    assert filled(ours, theirs) == Layout(8, 2, 4, (1,))
    assert filled(None, theirs) == theirs
    assert filled(ours, None) == ours
    assert filled(None, None) == Layout()
    assert list(differences(ours, theirs)) == [("layers", 4, 5)]
    assert not list(differences(ours, None))


@pytest.mark.parametrize(
    ("said", "layout"),
    [
        ((8, 2, 4, [3, 1]), Layout(8, 2, 4, (1, 3))),
        ((8, 2, 4, [1, 4]), Layout(8, 2, 4)),
        ((8, 2, 4, [True]), Layout(8, 2, 4)),
        ((8, 2, None, [-1]), Layout(8, 2)),
        ((0, -1, 1.5, []), None),
        ((2**16 + 1, True, "4", "12"), None),
        ((2**16, None, 10**9, None), Layout(num_experts=2**16)),
    ],
)
def test_what_cannot_be_is_left_out(said: tuple[Any, ...], layout: Layout | None) -> None:
    """An engine may say anything: what is no layout is not taken for one."""
    assert layout_said(*said) == layout
