"""The decoder-only transformer: its shape, its plain forward pass, and its file format.

Invariants:
- `forward` is the definition of the model: every other way of computing logits must agree with it.
- A mixture of experts is replayed by giving `forward` its routing; without one the routers choose.
- Causal attention over right-padded rows: padding is never seen by the tokens before it, so it needs no mask.
- `build` is a function of its arguments alone; it neither reads nor moves the global random state.
- `load_weights` validates the whole file before it writes anything: after an error the model is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn import functional

from rollout_svc.embedded.experts import Experts

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
        moe_layers: Blocks, counted from 0, whose feed-forward is a mixture of experts.
        num_experts: Experts of each of those.
        top_k: Experts a token goes through in each of those.
    """

    vocab_size: int = 32
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built.

        Raises:
            ValueError: A field is below 1, `width` is not a multiple of `heads`, `top_k` is above `num_experts`, or
                `moe_layers` names a block that is not there, or not in order.
        """
        for name in ("vocab_size", "width", "layers", "heads", "context", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is above num_experts {self.num_experts}")
        if list(self.moe_layers) != sorted(set(self.moe_layers) & set(range(self.layers))):
            raise ValueError(f"moe_layers {self.moe_layers} are not in order some of the layers 0 to {self.layers - 1}")

    @property
    def head_width(self) -> int:
        """Channels per attention head."""
        return self.width // self.heads

    def routing(self) -> dict[str, Any]:
        """Describe what routed experts of it look like, as `/server_info` does."""
        described = {"num_experts": self.num_experts, "top_k": self.top_k, "layers": self.layers}
        return described | {"moe_layers": list(self.moe_layers)}


PRESETS: Final[dict[str, TinyConfig]] = {
    "tiny": TinyConfig(vocab_size=257, context=1024),
    "tiny-moe": TinyConfig(vocab_size=257, context=1024, layers=3, moe_layers=(1, 2)),
    "wide": TinyConfig(vocab_size=257, context=256, width=2112, layers=5, heads=33),
}
"""Models by name. Vocabulary and context are the engine's defaults, replaced by its tokenizer and flags.

`wide` is for moving weights: 1 GiB of them (1,028 MiB in 65 tensors, the largest 68 MiB). It generates, slowly, and is
built in seconds; its context is short because the cache has a place for each token of each row.
"""


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
    """One pre-norm block: attention, then a GELU feed-forward of four times the width, or one of experts.

    Attributes:
        experts: The mixture of experts, in place of `expand` and `contract`; None in a dense block.
    """

    def __init__(self, config: TinyConfig, *, moe: bool = False) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.feed_norm = nn.LayerNorm(config.width)
        self.experts = Experts(config.width, config.num_experts, config.top_k) if moe else None
        if not moe:
            self.expand = nn.Linear(config.width, 4 * config.width)
            self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor, routing: Tensor | None = None) -> Tensor:
        """Map float[B, T, width] to the same shape, each position seeing itself and those before it.

        A `routing`, int64[B, T, top_k], is for a block of experts alone.
        """
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.feed_norm(hidden)
        fed: Tensor = (
            self.contract(functional.gelu(self.expand(normed)))
            if self.experts is None
            else self.experts(normed, routing)[0]
        )
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
        self.blocks = nn.ModuleList(Block(config, moe=layer in config.moe_layers) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=HEAD_INIT_STD)

    def forward(self, ids: Tensor, routing: Tensor | None = None) -> Tensor:
        """Compute the logits that follow every position.

        Args:
            ids: int64[B, T], T at most `config.context`, rows padded on the right with any valid id.
            routing: int64[B, T, len(config.moe_layers), top_k], the experts each token is to go through, as an engine
                has recorded them; negative numbers where the router is to choose, as on padding. None: everywhere.

        Returns:
            float32[B, T, vocab_size]; rows of padded positions mean nothing.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.tokens(ids) + self.positions(places)
        of = iter(() if routing is None else routing.unbind(2))
        for block in self.blocks:
            is_replayed = routing is not None and block.experts is not None
            hidden = block(hidden, next(of) if is_replayed else None)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


_SHOWN: Final = 3  # of what is wrong with weights, by kind


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
        # All of it, into memory: the file may change or go while the tensors wait to be written. And `safe_open` leaves
        # 60 bytes behind for each tensor that it gives out (safetensors 0.8.0): at every update of an engine's life.
        found: dict[str, Tensor] = load(source.read_bytes())
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
    """Describe every way in which two sets of tensors differ in name, shape or dtype."""
    both = [(name, tensor, found[name]) for name, tensor in wanted.items() if name in found]
    problems = [
        _some("missing ", sorted(wanted.keys() - found.keys())),
        _some("unknown ", sorted(found.keys() - wanted.keys())),
        _some(
            "", [f"{n} has shape {list(f.shape)}, expected {list(w.shape)}" for n, w, f in both if f.shape != w.shape]
        ),
        _some("", [f"{n} has dtype {f.dtype}, expected {w.dtype}" for n, w, f in both if f.dtype != w.dtype]),
    ]
    return "; ".join(filter(None, problems)) or None


def _some(what: str, names: list[str]) -> str:
    """Name a few, and count the others."""
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}{', '.join(names[:_SHOWN])}{more}"
