"""The mixture of experts: what it computes, what is recorded of it, and that a replay of the record is exact."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rollout_svc.embedded.experts import Experts, choose
from rollout_svc.embedded.model import TinyConfig
from rollout_svc.embedded.routing import DENSE
from rollout_svc.embedded.scheduler import Scheduler
from tests.embedded.helpers import MOE_CONFIG, VOCABULARY, job, moe_model, plain_logprobs, run_to_end, small_model

if TYPE_CHECKING:
    from rollout_svc.embedded.job import Job

MODEL = moe_model()
MOE = list(MOE_CONFIG.moe_layers)


def scheduler(max_running: int = 8) -> Scheduler:
    return Scheduler(MODEL, VOCABULARY, max_running=max_running)


def asking(rid: str = "r", **kwargs: Any) -> Job:
    """A job that asks for its routing."""
    one = job(rid, **kwargs)
    one.wants_routing = True
    return one


def routing_of(done: Job) -> torch.Tensor:
    """int64[tokens - 1, moe_layers, top_k] of a job that has ended."""
    assert done.routing is not None
    assert done.routing.shape == (done.length - 1, MOE_CONFIG.layers, MOE_CONFIG.top_k)
    return done.routing[:, MOE].long()


def crowd(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of many lengths, greedy and sampled."""
    return [
        {
            "rid": f"r{index}",
            "prompt": rng.choices(range(256), k=rng.randint(1, 150)),
            "limit": rng.randint(1, 60),
            "seed": rng.randint(0, 5),
            "temperature": rng.choice([0.0, 1.0, 1.3]),
        }
        for index in range(count)
    ]


def test_a_mixture_is_the_weighted_sum_of_its_chosen_experts() -> None:
    """The wide feed-forward with gates is what one gets expert by expert, from the definition."""
    torch.manual_seed(1)
    mixture, tokens = Experts(8, 4, 2), torch.randn(5, 8)
    with torch.inference_mode():
        got, chosen = mixture(tokens)
    mixture.requires_grad_(requires_grad=False)
    for token, value, pair in zip(tokens, got, chosen.tolist(), strict=True):
        logits = mixture.router(token)
        assert pair == sorted(range(4), key=lambda expert: -float(logits[expert]))[:2]
        gates = torch.softmax(logits[pair], dim=-1)
        expected = mixture.contract.bias.clone()
        for gate, expert in zip(gates, pair, strict=True):
            own = slice(8 * expert, 8 * expert + 8)
            inside = functional.gelu(functional.linear(token, mixture.expand.weight[own], mixture.expand.bias[own]))
            expected = expected + gate * functional.linear(inside, mixture.contract.weight[:, own])
        torch.testing.assert_close(value, expected)


def test_of_equal_logits_the_lower_index_is_chosen() -> None:
    """In any position: engine and trainer break ties alike."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert choose(logits, 3).tolist() == [[1, 3, 2], [0, 1, 2]]


def test_a_replayed_router_still_learns() -> None:
    """The gates are the router's own at the experts that were named: gradient flows into it, and into those alone."""
    torch.manual_seed(1)
    mixture, tokens = Experts(8, 4, 2), torch.randn(3, 8)
    mixture(tokens, torch.tensor([[1, 3]] * 3))[0].square().sum().backward()
    moved = mixture.router.weight.grad
    assert moved is not None
    assert [bool(row.any()) for row in moved] == [False, True, False, True]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_logprobs_and_routing_do_not_depend_on_the_batch(seed: int) -> None:
    """Alone or in a crowd that joins and leaves, a request gets the same of everything, bit by bit."""
    rng = random.Random(seed)
    requests = crowd(rng, 30)
    together = run_to_end(scheduler(rng.choice([3, 17])), [asking(**request) for request in requests])
    for request in requests:
        alone = run_to_end(scheduler(), [asking(**request)])[request["rid"]].job
        among = together[request["rid"]].job
        assert among.ids == alone.ids
        assert among.logprobs == alone.logprobs
        assert torch.equal(routing_of(among), routing_of(alone))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12))
def test_a_replay_gives_every_logprob(seed: int, count: int, max_running: int) -> None:
    """The recorded routing in a plain forward pass gives each log-probability to 1e-4, at any batch composition."""
    rng = random.Random(seed)
    for outcome in run_to_end(scheduler(max_running), [asking(**request) for request in crowd(rng, count)]).values():
        done = outcome.job
        plain = plain_logprobs(MODEL, done, routing_of(done))
        assert done.logprobs == pytest.approx(plain, abs=1e-4)


def test_a_wrong_row_gives_another_logprob() -> None:
    """One expert exchanged in any one row of any one layer shows in what follows it: the replay above can fail."""
    done = run_to_end(scheduler(), [asking(limit=12)])["r"].job
    right = routing_of(done)
    for row in range(len(done.prompt) - 1, len(right)):
        for layer in range(len(MOE)):
            wrong = right.clone()
            wrong[row, layer, 0] = next(expert for expert in range(8) if expert not in right[row, layer].tolist())
            plain = plain_logprobs(MODEL, done, wrong)
            place = row - len(done.prompt) + 1
            assert plain[:place] == pytest.approx(done.logprobs[:place], abs=1e-4)
            assert abs(plain[place] - done.logprobs[place]) > 1e-4


def test_a_retraction_keeps_the_rows_that_were_there() -> None:
    """Computed anew under other weights, a request keeps the routing its tokens were drawn under, and adds to it."""
    other = moe_model(7)
    engine = Scheduler(moe_model(), VOCABULARY, max_running=4)
    one = asking(prompt=range(40), limit=24)
    with torch.inference_mode():
        engine.submit(one)
        for _ in range(10):
            engine.step()
        held = len(one.ids)
        engine.retract()
        assert one.routing is not None
        before = one.routing.clone()
        engine.model.load_state_dict(other.state_dict())
        engine.thaw()
    done = run_to_end(engine)["r"].job
    rows = routing_of(done)
    kept = 40 + held - 1
    assert torch.equal(rows[:kept], before[:, MOE].long())
    old, new = plain_logprobs(MODEL, done, rows), plain_logprobs(other, done, _free(rows, kept))
    assert done.logprobs == pytest.approx(old[:held] + new[held:], abs=1e-4)
    assert done.logprobs[held:] != pytest.approx(old[held:], abs=1e-4)


def test_rows_are_recorded_on_across_an_update_that_keeps_the_cache() -> None:
    """Frozen in its row, a request keeps the routing that was there, and gets one row for each token after it."""
    engine = Scheduler(moe_model(), VOCABULARY, max_running=4)
    with torch.inference_mode():
        engine.submit(asking(limit=24))
        for _ in range(10):
            engine.step()
        engine.freeze()
        engine.model.load_state_dict(moe_model(7).state_dict())
        engine.thaw()
    rows = routing_of(run_to_end(engine)["r"].job)
    alone = routing_of(run_to_end(scheduler(), [asking(limit=24)])["r"].job)
    before = 3 + 11 - 1  # the first step prefills and decodes
    assert torch.equal(rows[:before], alone[:before])
    assert not torch.equal(rows[before:], alone[before:])


def test_nothing_is_recorded_for_who_does_not_ask() -> None:
    """Nor for a model without experts; dense layers hold what is no expert."""
    assert run_to_end(scheduler(), [job("r")])["r"].job.routing is None
    dense_model = Scheduler(small_model(), VOCABULARY, max_running=4)
    assert run_to_end(dense_model, [asking()])["r"].job.routing is None
    done = run_to_end(scheduler(), [asking()])["r"].job
    assert done.routing is not None
    dense = [layer for layer in range(MOE_CONFIG.layers) if layer not in MOE]
    assert dense
    assert bool((done.routing[:, dense] == DENSE).all())
    assert 0 <= int(done.routing[:, MOE].min()) <= int(done.routing[:, MOE].max()) < MOE_CONFIG.num_experts


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"top_k": 9}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_layers": (2,)}, "moe_layers"),
        ({"moe_layers": (1, 0)}, "moe_layers"),
        ({"moe_layers": (1, 1)}, "moe_layers"),
    ],
)
def test_mixtures_that_cannot_be_built_are_refused(fields: dict[str, Any], word: str) -> None:
    """A shape that makes no model is refused when it is named."""
    with pytest.raises(ValueError, match=word):
        TinyConfig(**fields)


def _free(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The same routing with the router free in the first rows."""
    freed = rows.clone()
    freed[:count] = -1
    return freed
