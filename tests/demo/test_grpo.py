"""The trainer's gradient: what counts, what does not, and what is clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.demo.grpo import GrpoOptions, GrpoTrainer, collate, collate_tensors, group_advantages
from rollout_svc.embedded.model import TinyConfig, TinyTransformer, build


def tiny(seed: int = 0) -> TinyTransformer:
    return build(TinyConfig(vocab_size=8, width=16, layers=1, heads=2, context=16), seed)


def logprobs_of(model: TinyTransformer, prompt: list[int], response: list[int]) -> list[float]:
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *response]])
        table = torch.log_softmax(model(ids), -1)[0]
    return [float(table[len(prompt) + place - 1, token]) for place, token in enumerate(response)]


def sample(model: TinyTransformer, response: list[int], reward: float, **changes: Any) -> dict[str, Any]:
    prompt = [1, 2, 3]
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "logprobs": logprobs_of(model, prompt, response),
        "loss_mask": [1] * len(response),
        "reward": reward,
        **changes,
    }


def gradient(model: TinyTransformer, groups: list[dict[str, Any]], **options: float) -> torch.Tensor:
    model.zero_grad()
    loss, _ = GrpoTrainer(model, GrpoOptions(**{"entropy_bonus": 0.0, **options})).objective(collate(groups))
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_at_the_weights_that_made_the_tokens_every_ratio_is_one() -> None:
    """Nothing is clipped, and the loss is minus the mean advantage per token."""
    model = tiny()
    groups = [{"samples": [sample(model, [4, 5, 0], 1.0), sample(model, [6, 0], 0.0)]}]
    loss, stats = GrpoTrainer(model, GrpoOptions(entropy_bonus=0.0)).objective(collate(groups))
    assert stats["ratio"] == pytest.approx(1, abs=1e-5)
    assert stats["clipped"] == 0
    assert stats["tokens"] == 5
    assert float(loss.detach()) == pytest.approx(-(3 * 1 - 2 * 1) / 5, abs=1e-5)


def test_the_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    """On-policy it is the gradient of the mean of advantage times logprob."""
    model = tiny()
    first, second = sample(model, [4, 5, 0], 1.0), sample(model, [6, 0], 0.0)
    ours = gradient(model, [{"samples": [first, second]}])
    model.zero_grad()
    total = torch.zeros(())
    for one, advantage in ((first, 1.0), (second, -1.0)):
        table = torch.log_softmax(model(torch.tensor([[*one["prompt_ids"], *one["response_ids"]]])), -1)[0]
        for place, token in enumerate(one["response_ids"]):
            total = total + advantage * table[len(one["prompt_ids"]) + place - 1, token]
    (-total / 5).backward()  # type: ignore[no-untyped-call]
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert torch.allclose(ours, plain, atol=1e-6)


def test_a_group_of_equal_rewards_moves_nothing() -> None:
    """Nothing was better than anything: the gradient is zero, but for the entropy bonus."""
    model = tiny()
    groups = [{"samples": [sample(model, [4, 5], 0.3), sample(model, [6, 0], 0.3)]}]
    assert gradient(model, groups).abs().max() == 0
    assert gradient(model, groups, entropy_bonus=0.01).abs().max() > 0


def test_masked_tokens_move_nothing() -> None:
    """What the model did not make (mask 0, logprob 0.0) has no part in loss or gradient."""
    model = tiny()
    masked = [
        {"samples": [sample(model, [4, 5, 7], 1.0, loss_mask=[1, 0, 0]), sample(model, [6, 5, 7], 0.0)]},
    ]
    wild = [
        {
            "samples": [
                sample(
                    model, [4, 5, 7], 1.0, loss_mask=[1, 0, 0], logprobs=[*logprobs_of(model, [1, 2, 3], [4]), 0, 0]
                ),
                sample(model, [6, 5, 7], 0.0),
            ]
        }
    ]
    assert torch.equal(gradient(model, masked, entropy_bonus=0.01), gradient(model, wild, entropy_bonus=0.01))


def test_padding_changes_nothing() -> None:
    """A sample counts the same beside a longer one that teaches nothing."""
    model = tiny()
    pair = {"samples": [sample(model, [4, 0], 1.0), sample(model, [6, 0], 0.0)]}
    silent = sample(model, [7] * 9, 0.5, loss_mask=[0] * 9)
    assert torch.allclose(gradient(model, [pair]), gradient(model, [pair, {"samples": [silent, silent]}]), atol=1e-7)


@pytest.mark.parametrize(
    ("reward", "shift", "moves"), [(1, -1.0, False), (1, 1.0, True), (0, 1.0, False), (0, -1.0, True)]
)
def test_the_ratio_is_clipped_only_on_the_side_that_has_gone_far_enough(reward: int, shift: float, moves: bool) -> None:
    """A good token that is already likelier, or a bad one already rarer, is left; going back is always open."""
    model = tiny()
    one = sample(model, [4, 5], float(reward))
    one["logprobs"] = [value + shift for value in one["logprobs"]]
    other = sample(model, [6, 5], 1.0 - reward, loss_mask=[0, 0])
    assert (gradient(model, [{"samples": [one, other]}]).abs().max() > 0) == moves


def test_a_step_moves_towards_the_better_answer() -> None:
    """After a few steps the better answer is likelier, the worse one rarer."""
    model = tiny()
    groups = [{"samples": [sample(model, [4, 0], 1.0), sample(model, [6, 0], 0.0)]}]
    before = [logprobs_of(model, [1, 2, 3], answer)[0] for answer in ([4], [6])]
    trainer = GrpoTrainer(model, GrpoOptions(lr=1e-2))
    for _ in range(3):
        trainer.step(collate(groups))
    after = [logprobs_of(model, [1, 2, 3], answer)[0] for answer in ([4], [6])]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_learning_rate_zero_leaves_the_policy() -> None:
    """With `--lr 0` not a weight changes."""
    model = tiny()
    before = [parameter.clone() for parameter in model.parameters()]
    groups = [{"samples": [sample(model, [4, 0], 1.0), sample(model, [6, 0], 0.0)]}]
    GrpoTrainer(model, GrpoOptions(lr=0.0)).step(collate(groups))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    """One rotten number does not end the policy."""
    model = tiny()
    before = [parameter.clone() for parameter in model.parameters()]
    rotten = sample(model, [4, 0], 1.0, logprobs=[float("nan"), 0.0])
    stats = GrpoTrainer(model, GrpoOptions()).step(collate([{"samples": [rotten, sample(model, [6, 0], 0.0)]}]))
    assert stats.gradient_norm != stats.gradient_norm
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_advantages_are_normalised_per_group(rewards: list[float]) -> None:
    """Mean 0 and deviation 1, in the order of the rewards; all zero where the rewards are equal."""
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    if any(advantages):
        assert sum(value**2 for value in advantages) / len(advantages) == pytest.approx(1, rel=1e-6)
        assert sorted(zip(rewards, advantages, strict=True)) == sorted(
            zip(rewards, advantages, strict=True), key=lambda pair: (pair[1], pair[0])
        )
    else:
        assert max(rewards) - min(rewards) < 1e-4


def test_a_batch_that_does_not_fit_together_is_refused() -> None:
    """Lengths that differ are an error that names the sample; so is a batch of nothing."""
    model = tiny()
    with pytest.raises(ValueError, match="sample s7"):
        collate([{"samples": [sample(model, [4, 0], 1.0, loss_mask=[1], sample_id="s7")]}])
    with pytest.raises(ValueError, match="without samples"):
        collate([{"samples": []}])


def moe(seed: int = 0) -> TinyTransformer:
    shape = TinyConfig(vocab_size=8, width=16, layers=2, heads=2, context=16, moe_layers=(1,), num_experts=4)
    return build(shape, seed)


def tensors_of(model: TinyTransformer, routing: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two groups of two samples as `take_batch(tensors=True)` gives them, drawn along one routing, int64[12, 1, 2]."""
    sequences, prompt = ([1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 0], [1, 2, 3, 0], [1, 2, 3, 7]), 3
    offsets = torch.tensor([0, 5, 9, 12, 15])
    ids = torch.zeros(4, 6, dtype=torch.int64)
    logprobs, loss_mask, attention = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.uint8), torch.zeros(4, 6) > 0
    for row, sequence in enumerate(sequences):
        end = len(sequence)
        ids[row, :end] = torch.tensor(sequence)
        attention[row, :end] = True
        loss_mask[row, prompt:end] = 1
        with torch.no_grad():
            table = torch.log_softmax(
                model(ids[row, : end - 1][None], routing[None, offsets[row] : offsets[row + 1]]), -1
            )
        logprobs[row, prompt:end] = table[0].gather(1, ids[row, 1:end, None]).squeeze(1)[prompt - 1 :]
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "routed_experts": routing.to(torch.uint8),
        "routed_experts_offsets": offsets,
    }


def any_routing() -> torch.Tensor:
    """One that no router would choose."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(15)])[:, None]


def test_a_batch_of_tensors_is_trained_on_along_the_routing_it_brings() -> None:
    """Every ratio is one where the experts are replayed, and is not where the router chooses anew."""
    model = moe()
    with torch.no_grad():
        model.head.weight.mul_(20)
    tensors = tensors_of(model, any_routing())
    trainer = GrpoTrainer(model, GrpoOptions(entropy_bonus=0.0))
    batch = collate_tensors(tensors)
    assert batch.routing is not None
    assert batch.routing.shape == (4, 5, 1, 2)
    stats = trainer.objective(batch)[1]
    assert (stats["clipped"], stats["tokens"]) == (0, 7)
    assert stats["ratio"] == pytest.approx(1, abs=1e-5)
    del tensors["routed_experts"]
    assert trainer.objective(collate_tensors(tensors))[1]["clipped"] > 0


def test_a_batch_of_tensors_is_the_batch_of_records() -> None:
    """Either form of one batch gives the same tensors."""
    model = tiny()
    groups = [{"samples": [sample(model, [4, 5, 0], 1.0), sample(model, [6, 0], 0.0)]}]
    records = collate(groups)
    shifted = {"logprobs": records.behaviour_logprobs, "loss_mask": records.mask}
    padded = {name: torch.cat([torch.zeros(2, 1), values], dim=1) for name, values in shifted.items()}
    tensors = padded | {
        "input_ids": records.ids,
        "attention_mask": torch.tensor([[True] * 6, [True] * 5 + [False]]),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
    }
    batch = collate_tensors(tensors)
    assert batch.routing is None
    for name in ("ids", "behaviour_logprobs", "mask", "advantages"):
        assert torch.equal(getattr(batch, name), getattr(records, name))


def test_routing_that_is_not_of_all_tokens_is_refused() -> None:
    """A row too few would be trained on as if the router had been free."""
    tensors = tensors_of(moe(), any_routing())
    tensors["routed_experts_offsets"] = torch.tensor([0, 5, 8, 12, 15])
    with pytest.raises(ValueError, match="sample 1: 3 rows of routed experts for 5 tokens"):
        collate_tensors(tensors)


def test_no_sample_is_no_batch_of_tensors() -> None:
    """As with records."""
    empty = {"input_ids": torch.zeros(0, 0), "group_ids": torch.zeros(0), "rewards": torch.zeros(0)}
    with pytest.raises(ValueError, match="without samples"):
        collate_tensors(empty)
