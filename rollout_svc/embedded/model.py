"""The decoder-only transformer: its shape, its plain forward pass, and its file format.

Invariants:
- `forward` is the definition of the model: every other way of computing logits must agree with it.
- Causal attention over right-padded rows: padding is never seen by the tokens before it, so it needs no mask.
- `build` is a function of its arguments alone; it neither reads nor moves the global random state.
- `load_weights` validates the whole file before it writes anything: after an error the model is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

HEAD_INIT_STD: Final = 0.02
"""Standard deviation of the output head at birth: logits near zero, so a fresh policy is close to uniform."""

WEIGHTS_FILE: Final = "model.safetensors"
"""The file looked for when a weights path names a directory."""


class WeightsError(ValueError):
    """Raised when a weights file is missing, unreadable, or does not fit the model; nothing was written."""


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Shape of a `TinyTransformer`; the default has 107k parameters.

    Attributes:
        vocab_size: Number of token ids.
        width: Residual width; a multiple of `heads`.
        layers: Number of blocks.
        heads: Attention heads per block.
        context: Most tokens, prompt and response together, a sequence may hold.
    """

    vocab_size: int = 32
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built.

        Raises:
            ValueError: A field is below 1, or `width` is not a multiple of `heads`.
        """
        for name in ("vocab_size", "width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")

    @property
    def head_width(self) -> int:
        """Channels per attention head."""
        return self.width // self.heads


PRESETS: Final[dict[str, TinyConfig]] = {"tiny": TinyConfig(vocab_size=257, context=1024)}
"""Models by name. Vocabulary and context are the engine's defaults, replaced by its tokenizer and flags."""


def preset(name: str, *, vocab_size: int | None = None, context: int | None = None) -> TinyConfig:
    """Return the named shape with its vocabulary and context replaced where given.

    Raises:
        ValueError: No such preset, or a size out of bounds.
    """
    try:
        config = PRESETS[name]
    except KeyError:
        raise ValueError(f"unknown model {name!r}, expected one of: {', '.join(sorted(PRESETS))}") from None
    return replace(
        config,
        vocab_size=config.vocab_size if vocab_size is None else vocab_size,
        context=config.context if context is None else context,
    )


class Block(nn.Module):
    """One pre-norm block: attention, then a GELU feed-forward of four times the width."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.feed_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float[B, T, width] to the same shape, each position seeing itself and those before it."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.contract(functional.gelu(self.expand(self.feed_norm(hidden))))
        return hidden + fed


class TinyTransformer(nn.Module):
    """A decoder-only transformer with learned positions and an untied head.

    Attributes:
        config: The shape it was built with.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=HEAD_INIT_STD)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits that follow every position.

        Args:
            ids: int64[B, T], T at most `config.context`, rows padded on the right with any valid id.

        Returns:
            float32[B, T, vocab_size]; rows of padded positions mean nothing.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build(config: TinyConfig, seed: int) -> TinyTransformer:
    """Build a float32 model on the CPU whose weights depend on `config` and `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyTransformer(config)


def save_weights(model: TinyTransformer, path: str | Path) -> None:
    """Write the weights as safetensors, by a rename: a reader finds the old file or the whole new one.

    Args:
        model: The model to save.
        path: A file, or an existing directory, which gets a `model.safetensors`.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        target /= WEIGHTS_FILE
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    partial = target.with_name(f".{target.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(target)


def load_weights(model: TinyTransformer, path: str | Path) -> None:
    """Read a safetensors file into the model, in place: all of it, or on any error nothing.

    Args:
        model: The model to overwrite; its parameters stay the same tensors.
        path: A safetensors file, or a directory holding `model.safetensors`.

    Raises:
        WeightsError: The file is missing, unreadable, or its names, shapes or dtypes differ from the model's.
    """
    write_weights(model, read_weights(model, path))


def read_weights(model: TinyTransformer, path: str | Path) -> dict[str, Tensor]:
    """Read and validate a safetensors file against the model, changing nothing.

    Raises:
        WeightsError: As `load_weights`.
    """
    source = Path(path)
    try:
        if source.is_dir():
            source /= WEIGHTS_FILE
        if not source.is_file():
            raise WeightsError(f"no weights at {source}")
        with safe_open(source, framework="pt") as file:
            # Copies: the file may change or go while they wait to be written.
            found: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"cannot read weights at {source}: {error}") from error
    problem = _mismatch(model.state_dict(), found)
    if problem is not None:
        raise WeightsError(f"weights at {source} do not fit the model: {problem}")
    return found


def write_weights(model: TinyTransformer, tensors: dict[str, Tensor]) -> None:
    """Copy tensors that `read_weights` has validated into the model's parameters, in place."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensors[name])


def _mismatch(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    """Describe the first way in which two sets of tensors differ in name, shape or dtype."""
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        return f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")  # noqa: PLR2004
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        return f"unknown {', '.join(unknown[:3])}" + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")  # noqa: PLR2004
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            return f"{name} has shape {list(found[name].shape)}, expected {list(tensor.shape)}"
        if found[name].dtype != tensor.dtype:
            return f"{name} has dtype {found[name].dtype}, expected {tensor.dtype}"
    return None
