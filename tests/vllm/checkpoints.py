"""Checkpoints an engine must not be served from: copies of a good one, each broken in one way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file, save_file

__all__ = ["BROKEN", "broken"]

WEIGHTS: Final = "model.safetensors"
DOWN: Final = "model.layers.1.mlp.down_proj.weight"
GATE: Final = "model.layers.1.mlp.gate_proj.weight"

Tensors = dict[str, np.ndarray]


def broken(good: Path, how: str, directory: Path) -> Path:
    """Copy a checkpoint, and break it."""
    made = directory / how
    shutil.copytree(good, made)
    BROKEN[how](made)
    return made


def _half_written(at: Path) -> None:
    """The trainer is still at it, or died."""
    whole = (at / WEIGHTS).read_bytes()
    (at / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def _missing_shard(at: Path) -> None:
    """The index names a file that is not there."""
    tensors = load_file(at / WEIGHTS)
    (at / WEIGHTS).unlink()
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    names = sorted(tensors)
    half = len(names) // 2
    _save({name: tensors[name] for name in names[:half]}, at / first)
    files = dict.fromkeys(names[:half], first) | dict.fromkeys(names[half:], second)
    (at / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _wrong_shape(at: Path) -> None:
    """A model of another size: what came before this tensor is loaded by then."""
    tensors = load_file(at / WEIGHTS)
    _save(tensors | {DOWN: np.zeros((3, 5), np.float32)}, at / WEIGHTS)


def _torn_layer(at: Path) -> None:
    """A model of another kind: the engine gives up between two tensors of a layer that it keeps as one."""
    tensors = load_file(at / WEIGHTS)
    _save(tensors | {GATE.replace("gate_proj", "gate_proz"): np.zeros(3, np.float32)}, at / WEIGHTS)


def _save(tensors: Tensors, file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


BROKEN: Final[dict[str, Callable[[Path], None]]] = {
    "half_written": _half_written,
    "missing_shard": _missing_shard,
    "wrong_shape": _wrong_shape,
    "torn_layer": _torn_layer,
}
