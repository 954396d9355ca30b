"""Group-relative policy optimisation, as small as it can be and still be right off-policy.

Per group, advantage = (reward - mean) / std (Shao et al., DeepSeekMath, 2024); per token, the clipped surrogate of
Schulman et al. (PPO, 2017) with the ratio taken against the logprob that the engine reported when it drew the token.

Invariants:

- The denominator of every ratio is the engine's own logprob, so a token continued under newer weights counts with
  the weights that made it. At equal weights every ratio is 1.
- A token with mask 0 moves nothing, and neither does a group of equal rewards, but for the entropy bonus.
- A step whose gradient is not finite changes no weight.
- Where the engine has told which experts each token went through, the forward pass takes the same (Ma et al.,
  Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout_svc.embedded.model import TinyTransformer

__all__ = ["GrpoOptions", "GrpoTrainer", "StepStats", "TrainBatch", "collate", "collate_tensors", "group_advantages"]

FREE: Final = -1
"""In a routing: the router chooses, as on padding."""

EQUAL_REWARDS_STD: Final = 1e-6
"""A group whose rewards differ by less teaches nothing: its advantages are 0, not noise divided by noise."""


@dataclass(frozen=True, slots=True)
class GrpoOptions:
    """Knobs of the trainer.

    Attributes:
        lr: Adam's learning rate; 0 leaves the policy as it is.
        ratio_clip: The ratio counts within 1 ± this.
        entropy_bonus: Weight of the policy's entropy, nats per token.
        gradient_clip: Largest norm of the gradient.
    """

    lr: float = 1e-3
    ratio_clip: float = 0.2
    entropy_bonus: float = 0.01
    gradient_clip: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A batch as tensors; B samples, T the longest sequence, position t of the last three is about token t + 1.

    Attributes:
        ids: int64[B, T], prompt then response, padded on the right with 0.
        behaviour_logprobs: float32[B, T - 1], the engine's.
        mask: float32[B, T - 1], 1 where the model made the token.
        advantages: float32[B].
        routing: int64[B, T - 1, moe_layers, top_k], the engine's experts for the first T - 1 tokens, if it told.
    """

    ids: Tensor
    behaviour_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    routing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step did; per-token values are means over the tokens that count."""

    loss: float
    entropy: float
    ratio: float
    clipped: float
    gradient_norm: float
    tokens: int


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / std of one group; zeros where the rewards are equal."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std < EQUAL_REWARDS_STD:
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


def collate(groups: Sequence[Mapping[str, Any]]) -> TrainBatch:
    """Build the tensors of a batch from its groups, as `take_batch` returns them.

    Raises:
        ValueError: There is no sample, or one's response, logprobs and mask differ in length.
    """
    samples: list[Mapping[str, Any]] = []
    advantages: list[float] = []
    for group in groups:
        samples += group["samples"]
        advantages += group_advantages([sample["reward"] for sample in group["samples"]])
    if not samples:
        raise ValueError("a batch without samples")
    width = max(len(sample["prompt_ids"]) + len(sample["response_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    logprobs = torch.zeros(len(samples), width - 1)
    mask = torch.zeros(len(samples), width - 1)
    for row, sample in enumerate(samples):
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        if not len(response) == len(sample["logprobs"]) == len(sample["loss_mask"]):
            raise ValueError(f"sample {sample.get('sample_id')}: response, logprobs and loss_mask differ in length")
        start, end = len(prompt), len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        logprobs[row, start - 1 : end - 1] = torch.tensor(sample["logprobs"], dtype=torch.float32)
        mask[row, start - 1 : end - 1] = torch.tensor(sample["loss_mask"], dtype=torch.float32)
    return TrainBatch(ids, logprobs, mask, torch.tensor(advantages))


def collate_tensors(tensors: Mapping[str, Tensor]) -> TrainBatch:
    """Build the tensors of a batch from those of `take_batch(tensors=True)`, routed experts included.

    Raises:
        ValueError: There is no sample, or one's routed experts are not of all its tokens but the last.
    """
    ids, owners, rewards = tensors["input_ids"], tensors["group_ids"].tolist(), tensors["rewards"].tolist()
    if not owners:
        raise ValueError("a batch without samples")
    advantages: list[float] = []
    for group in dict.fromkeys(owners):
        advantages += group_advantages(
            [reward for owner, reward in zip(owners, rewards, strict=True) if owner == group]
        )
    return TrainBatch(
        ids,
        tensors["logprobs"][:, 1:],
        tensors["loss_mask"][:, 1:].float(),
        torch.tensor(advantages),
        _routing(tensors, tensors["attention_mask"].sum(dim=1).tolist()),
    )


def _routing(tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Lay the rows of each sample out as `TrainBatch.routing`."""
    rows = tensors.get("routed_experts")
    if rows is None:
        return None
    offsets = tensors["routed_experts_offsets"].tolist()
    routing = torch.full((len(lengths), tensors["input_ids"].shape[1] - 1, *rows.shape[1:]), FREE)
    for index, length in enumerate(lengths):
        start, end = offsets[index : index + 2]
        if end - start != length - 1:
            raise ValueError(f"sample {index}: {end - start} rows of routed experts for {length} tokens")
        routing[index, : length - 1] = rows[start:end].long()
    return routing


class GrpoTrainer:
    """Adam on the clipped objective."""

    def __init__(self, model: TinyTransformer, options: GrpoOptions) -> None:
        self.model = model
        self.options = options
        self._optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    def step(self, batch: TrainBatch) -> StepStats:
        """Take one step on a batch.

        Returns:
            Its figures; where the gradient was not finite, the weights are as they were.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss, stats = self.objective(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.gradient_clip))
        if math.isfinite(norm):
            self._optimizer.step()
        return StepStats(loss=float(loss.detach()), gradient_norm=norm, **stats)

    def objective(self, batch: TrainBatch) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of a batch, and the figures that go with it."""
        options = self.options
        distribution = torch.log_softmax(self.model(batch.ids[:, :-1], batch.routing), dim=-1)
        logprobs = distribution.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        # Padding carries logprobs of nothing: their difference is cut before exp can overflow.
        ratio = ((logprobs - batch.behaviour_logprobs) * batch.mask).exp()
        advantage = batch.advantages[:, None]
        clipped = ratio.clamp(1 - options.ratio_clip, 1 + options.ratio_clip)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        tokens = batch.mask.sum().clamp(min=1)

        def mean(values: Tensor) -> Tensor:
            return (values * batch.mask).sum() / tokens

        loss = -mean(surrogate + options.entropy_bonus * entropy)
        with torch.no_grad():
            stats = {
                "entropy": float(mean(entropy)),
                "ratio": float(mean(ratio)),
                "clipped": float(mean((ratio != clipped).float())),
                "tokens": int(batch.mask.sum()),
            }
        return loss, stats
