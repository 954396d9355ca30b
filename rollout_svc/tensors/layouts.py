"""What the routing of a model looks like, by its `config.json`; and what several who know say together.

Invariants:

- Pure, save for `read_layout`, which reads one small file and never raises.
- What a config does not say is None, never guessed; a model without experts has no layout.
- Of two who know, both have to say the same: a difference is named, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rollout_svc.config.settings import ExpertsConfig
from rollout_svc.tensors.experts import Layout

__all__ = ["configured", "differences", "filled", "layout_of", "layout_said", "read_layout"]

_EXPERTS: Final = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
)  # Qwen, DeepSeek, Mixtral
_TOP_K: Final = ("num_experts_per_tok", "num_experts_per_token")
_NESTED: Final = ("text_config", "llm_config", "language_config")  # of models that see or hear
_CONFIG: Final = "config.json"
_MOST_EXPERTS: Final = 2**16  # as many as two bytes can name
_MOST_LAYERS: Final = 10_000  # more than any model has: what an engine says is not made into a list unseen
_MAX_BYTES: Final = 2**20  # of a model's config: they have a few KiB


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Read a Hugging Face model config.

    Args:
        config: the object in `config.json`.

    Returns:
        None for a model without experts, or a config in words that are not known. Which layers are dense is said by
        `first_k_dense_replace` with `moe_layer_freq` (DeepSeek, GLM), or by `mlp_only_layers` with
        `decoder_sparse_step` (Qwen), as `transformers` reads them; by none of them: none is.
    """
    nested: Mapping[str, Any] = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), {})
    text = {**config, **nested}
    num_experts, layers = _count(text, *_EXPERTS), _count(text, "num_hidden_layers")
    if num_experts is None:
        return None
    moe_layers = None
    if layers is not None and layers <= _MOST_LAYERS:
        moe_layers = tuple(index for index in range(layers) if _has_experts(index, text))
    return layout_said(num_experts, _count(text, *_TOP_K), layers, moe_layers)


def configured(experts: ExpertsConfig) -> Layout:
    """What the settings say."""
    listed = experts.moe_layers
    return Layout(experts.num_experts, experts.top_k, experts.layers, None if listed is None else tuple(sorted(listed)))


def layout_said(num_experts: Any, top_k: Any, layers: Any, moe_layers: Any) -> Layout | None:
    """Make a layout of what somebody else says, leaving out what cannot be; None where nothing is left."""
    known = _number(num_experts, _MOST_EXPERTS), _number(top_k, _MOST_EXPERTS), _number(layers, _MOST_LAYERS)
    listed: tuple[int, ...] | None = None
    if isinstance(moe_layers, list | tuple) and moe_layers:
        within = range(known[2] or _MOST_LAYERS)
        if all(type(layer) is int and layer in within for layer in moe_layers):
            listed = tuple(sorted(set(moe_layers)))
    layout = Layout(*known, listed)
    return None if layout == Layout() else layout


def _number(value: Any, most: int) -> int | None:
    return value if type(value) is int and 0 < value <= most else None


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these that is a number above 0."""
    return next((value for key in keys if type(value := config.get(key)) is int and value > 0), None)


def _has_experts(layer: int, config: Mapping[str, Any]) -> bool:
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):  # 0 or 1 for each layer
        return bool(layer < len(frequency) and frequency[layer])
    first = config.get("first_k_dense_replace")
    dense = config.get("mlp_only_layers")
    return (
        layer >= (first if type(first) is int else 0)
        and layer % (_count(config, "moe_layer_freq") or 1) == 0
        and layer not in (dense if isinstance(dense, list) else ())
        and (layer + 1) % (_count(config, "decoder_sparse_step") or 1) == 0
    )


def read_layout(folder: str) -> Layout | None:
    """Read the config of a model that lies in a folder; may block.

    Args:
        folder: an absolute path: a model's public name is no folder of ours.

    Returns:
        None where there is no such file, or none that says anything.
    """
    path = Path(folder) / _CONFIG
    try:
        if not path.is_absolute() or path.stat().st_size > _MAX_BYTES:
            return None
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return layout_of(config) if isinstance(config, dict) else None


def filled(layout: Layout | None, other: Layout | None) -> Layout:
    """Join two layouts: the first's word where it has one, else the second's."""
    said = {name: word for name, word in (layout or Layout())._asdict().items() if word is not None}
    return (other or Layout())._replace(**said)


def differences(layout: Layout | None, other: Layout | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield each field in which two layouts contradict each other: its name, the first's word, the second's."""
    for name, ours, theirs in zip(Layout._fields, layout or Layout(), other or Layout(), strict=True):
        if None not in (ours, theirs) and ours != theirs:
            yield name, ours, theirs
