"""One draw for many requests."""

import math

import pytest
import torch

from rollout_svc.embedded.sampling import Sampling, SamplingRows, draw_uniforms, sample


def draw(logits: torch.Tensor, request: Sampling, count: int) -> torch.Tensor:
    """Draw many tokens from one row of logits."""
    rows = SamplingRows.of([request] * count, logits.shape[0])
    ids, _ = sample(logits.expand(count, -1), rows, draw_uniforms(0, count))
    return ids


def test_draws_follow_the_tempered_distribution() -> None:
    """Frequencies approach softmax(logits / temperature)."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.bincount(draw(logits, Sampling(temperature=2.0), 40_000), minlength=4) / 40_000
    # Four standard deviations of a frequency over 40,000 draws.
    torch.testing.assert_close(counts, torch.softmax(logits / 2, dim=-1), atol=4 * 0.5 / math.sqrt(40_000), rtol=0)


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_p=0.6), {1, 3}),
        (Sampling(top_p=1e-9), {1}),
        (Sampling(top_p=0.95, top_k=3), {0, 1, 3}),
        (Sampling(temperature=0.0, top_p=0.9), {1}),
    ],
)
def test_filters_keep_the_likeliest(request_: Sampling, allowed: set[int]) -> None:
    """Top-k keeps k tokens, top-p the fewest whose mass reaches p, both together what both keep."""
    logits = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))
    assert set(draw(logits, request_, 4_000).tolist()) == allowed


def test_a_filter_leaves_the_other_rows_alone() -> None:
    """A row without filters draws the same beside one with them."""
    logits = torch.randn(64, 50)
    uniforms = draw_uniforms(1, 64)
    plain = [Sampling()] * 64
    mixed = [Sampling(top_k=3) if row % 2 else Sampling() for row in range(64)]
    expected, _ = sample(logits, SamplingRows.of(plain, 50), uniforms)
    found, _ = sample(logits, SamplingRows.of(mixed, 50), uniforms)
    assert torch.equal(found[::2], expected[::2])


def test_the_extremes_of_the_uniform_draw_a_possible_token() -> None:
    """Neither 0 nor the largest number below 1 draws a token of chance 0."""
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(2, -1)
    ids, logprobs = sample(logits, SamplingRows.of([Sampling()] * 2, 4), torch.tensor([0.0, 1 - 2**-24]))
    assert ids.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()


def test_uniforms_of_a_seed_are_a_prefix_of_more() -> None:
    """How many numbers are asked for does not change the first ones."""
    many = draw_uniforms(7, 500)
    for count in (1, 7, 15, 16, 17, 64, 499):
        assert torch.equal(draw_uniforms(7, count), many[:count])


def test_logprobs_are_of_the_raw_logits() -> None:
    """Temperature and filters do not enter the log-probability."""
    logits = torch.randn(1, 10)
    ids, logprobs = sample(logits, SamplingRows.of([Sampling(temperature=0.3, top_k=2)], 10), torch.tensor([0.5]))
    assert torch.equal(logprobs, torch.log_softmax(logits, dim=-1)[0, ids])
