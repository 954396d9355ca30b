"""Continuous batching: what a request gets does not depend on its company."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.embedded.job import Outcome
from rollout_svc.embedded.scheduler import PREFILL_TOKENS, Scheduler
from tests.embedded.helpers import VOCABULARY, job, plain_logprobs, run_to_end, small_model

MODEL = small_model()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 0.7},
    {"top_k": 20, "top_p": 0.5, "temperature": 1.3},
]


def scheduler(max_running: int = 8) -> Scheduler:
    return Scheduler(MODEL, VOCABULARY, max_running=max_running)


def crowd(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of many lengths and settings."""
    return [
        {
            "rid": f"r{index}",
            "prompt": rng.choices(range(256), k=rng.randint(1, 80)),
            "limit": rng.randint(1, 60),
            "seed": rng.randint(0, 5),
            **rng.choice(SETTINGS),
        }
        for index in range(count)
    ]


def run_staggered(rng: random.Random, requests: list[dict[str, Any]], max_running: int) -> dict[str, Outcome]:
    """Run requests that arrive in random order at random steps."""
    engine = scheduler(max_running)
    waiting = rng.sample(requests, k=len(requests))
    ended: dict[str, Outcome] = {}
    with torch.inference_mode():
        while waiting or engine.busy:
            for _ in range(min(len(waiting), rng.randint(0, 3))):
                engine.submit(job(**waiting.pop()))
            engine.step()
            ended |= {outcome.job.rid: outcome for outcome in engine.take_ended()}
    assert engine.batch.free == engine.batch.rows
    return ended


@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_logprobs_do_not_depend_on_the_batch(seed: int) -> None:
    """Alone or joining and leaving a crowd, a request gets the same tokens and log-probabilities, bit by bit."""
    rng = random.Random(seed)
    requests = crowd(rng, 40)
    together = run_staggered(rng, requests, max_running=rng.choice([3, 17, 40]))
    assert together.keys() == {request["rid"] for request in requests}
    for request in requests:
        alone = run_to_end(scheduler(), [job(**request)])[request["rid"]].job
        assert together[request["rid"]].job.ids == alone.ids
        assert together[request["rid"]].job.logprobs == alone.logprobs


@pytest.mark.parametrize("seed", range(3))
def test_freezing_and_retracting_change_no_token(seed: int) -> None:
    """However often a crowd is frozen, retracted and thawed, each gets the tokens that it gets alone."""
    rng = random.Random(seed)
    requests = crowd(rng, 12)
    engine = scheduler(5)
    ended: dict[str, Outcome] = {}
    with torch.inference_mode():
        for request in requests:
            engine.submit(job(**request))
        while engine.busy:
            engine.step()
            if rng.random() < 0.2:
                rng.choice([engine.freeze, engine.retract])()
                assert engine.frozen
                engine.thaw()
            ended |= {outcome.job.rid: outcome for outcome in engine.take_ended()}
    assert engine.batch.free == engine.batch.rows
    assert any(outcome.job.retractions for outcome in ended.values())
    for request in requests:
        alone = run_to_end(scheduler(), [job(**request)])[request["rid"]].job
        assert ended[request["rid"]].job.ids == alone.ids
        assert ended[request["rid"]].job.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12))
def test_logprobs_equal_the_plain_forward_pass(seed: int, count: int, max_running: int) -> None:
    """Every log-probability is that of one plain full forward pass to 1e-4, at any batch composition."""
    rng = random.Random(seed)
    for outcome in run_staggered(rng, crowd(rng, count), max_running).values():
        plain = plain_logprobs(MODEL, outcome.job)
        assert outcome.job.logprobs == pytest.approx(plain, abs=1e-4)
        assert len(outcome.job.ids) == len(outcome.job.logprobs) == outcome.job.limit


def test_a_request_joins_between_two_steps() -> None:
    """A newcomer starts at the next step, while the one before it is still at work."""
    engine = scheduler()
    first, second = job("first", limit=20), job("second", limit=3)
    with torch.inference_mode():
        engine.submit(first)
        engine.step()
        engine.submit(second)
        engine.step()
    assert len(first.ids) == 3
    assert len(second.ids) == 2
    ended = run_to_end(engine)
    assert list(ended) == ["second", "first"]


def test_more_than_fit_wait_their_turn() -> None:
    """Requests above the rows wait, start in the order they came, and all end."""
    engine = scheduler(max_running=2)
    jobs = [job(f"r{index}", limit=4) for index in range(5)]
    with torch.inference_mode():
        for one in jobs:
            engine.submit(one)
        engine.step()
    assert [len(engine.batch.jobs), len(engine.waiting)] == [2, 3]
    assert list(run_to_end(engine)) == [f"r{index}" for index in range(5)]


def test_prefill_is_bounded_per_step() -> None:
    """A wave of long prompts is taken in over several steps; one above the budget still gets in."""
    engine = scheduler(max_running=64)
    with torch.inference_mode():
        for index in range(20):
            engine.submit(job(f"r{index}", prompt=[index] * 200, limit=50))
        engine.step()
        assert len(engine.batch.jobs) == PREFILL_TOKENS // 224
        while engine.waiting:
            engine.step()
        assert len(engine.batch.jobs) == 20


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("steps", [1, 7, 30])
def test_an_abort_keeps_a_prefix(sampling: dict[str, Any], steps: int) -> None:
    """An aborted request ends at once with the first tokens of what it would have produced."""
    whole = run_to_end(scheduler(), [job("whole", limit=60, **sampling)])["whole"].job
    engine = scheduler()
    with torch.inference_mode():
        engine.submit(job("cut", limit=60, **sampling))
        engine.submit(job("stays", limit=60, **sampling))
        for _ in range(steps):
            engine.step()
        assert engine.abort(lambda one: one.rid == "cut") == 1
        (outcome,) = engine.take_ended()
    assert outcome.finish_reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert outcome.job.ids == whole.ids[: steps + 1]
    assert outcome.job.logprobs == whole.logprobs[: steps + 1]
    assert run_to_end(engine)["stays"].job.ids == whole.ids


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_request_resumed_with_its_seed_draws_the_same(sampling: dict[str, Any]) -> None:
    """Cut short, and resumed with its tokens as prompt, a seeded request ends as if never cut."""
    whole = run_to_end(scheduler(), [job("whole", limit=40, **sampling)])["whole"].job
    resumed = job("resumed", prompt=[*whole.prompt, *whole.ids[:13]], limit=27, **sampling)
    assert run_to_end(scheduler(), [resumed])["resumed"].job.ids == whole.ids[13:]


def test_an_abort_of_a_queued_request_finds_it_in_the_queue() -> None:
    """A request that never ran ends with no tokens and the queue's own message."""
    engine = scheduler(max_running=1)
    with torch.inference_mode():
        engine.submit(job("runs", limit=5))
        engine.submit(job("queued"))
        engine.step()
        assert engine.abort(lambda one: one.rid == "queued") == 1
        (outcome,) = engine.take_ended()
    assert outcome.finish_reason == {"type": "abort", "message": "Abort in waiting queue"}
    assert (outcome.stage, outcome.job.ids, outcome.job.spans()) == ("waiting", [], [])
    assert list(run_to_end(engine)) == ["runs"]


def test_seeds_fix_the_draw_and_their_absence_does_not() -> None:
    """One seed, one output; another seed, or none, another."""
    outcomes = run_to_end(
        scheduler(),
        [
            job("a", seed=3),
            job("b", seed=3),
            job("c", seed=4),
            job("d", seed=None),
            job("e", seed=None),
            job("f", seed=-3),
        ],
    )
    ids = {rid: outcome.job.ids for rid, outcome in outcomes.items()}
    assert ids["a"] == ids["b"]
    assert len({tuple(ids[rid]) for rid in "acdef"}) == 5


def test_limit_of_zero_ends_without_tokens() -> None:
    """A request for no tokens is answered, with none."""
    outcome = run_to_end(scheduler(), [job("none", limit=0)])["none"]
    assert (outcome.finish_reason, outcome.job.ids) == ({"type": "length", "length": 0}, [])


def test_stop_conditions_end_the_output_at_the_token_that_met_them() -> None:
    """A stop id, the end token and a stop string each end the output, which keeps the token; length wins over none."""
    free = run_to_end(scheduler(), [job("free", limit=40, temperature=0.0)])["free"].job
    token = free.ids[5]
    first = free.ids.index(token)
    by_id = job("id", limit=40, temperature=0.0, stop_token_ids=frozenset({token}))
    letters = job("letters", limit=200, top_k=None, stop=("no such text at all", "a", "e", "x", "1"), seed=9)
    last = job("last", limit=first + 1, temperature=0.0, stop_token_ids=frozenset({token}))
    ended = run_to_end(scheduler(), [by_id, letters, last])
    assert ended["id"].finish_reason == {"type": "stop", "matched": token}
    assert by_id.ids == free.ids[: first + 1]
    matched = ended["letters"].finish_reason["matched"]
    assert VOCABULARY.decode(letters.ids).endswith(matched)
    assert sum(VOCABULARY.decode(letters.ids).count(letter) for letter in "aex1") == 1
    assert ended["last"].finish_reason == {"type": "stop", "matched": token}


def test_a_stop_string_may_span_tokens() -> None:
    """A string of several tokens is found where its last token completes it."""
    free = run_to_end(scheduler(), [job("free", limit=60, seed=2)])["free"].job
    text = [chr(token) for token in free.ids]
    start = next(i for i in range(57) if all(" " < letter < "\x7f" for letter in text[i : i + 2]))
    stop = "".join(text[start : start + 2])
    outcome = run_to_end(scheduler(), [job("cut", limit=60, seed=2, stop=(stop,))])["cut"]
    assert outcome.finish_reason == {"type": "stop", "matched": stop}
    assert outcome.job.ids == free.ids[: start + 2]


def test_spans_follow_the_labels() -> None:
    """Each output token belongs to the label the weights had when it was made; spans cover the output."""
    engine = scheduler()
    crossing = job("crossing", limit=10)
    with torch.inference_mode():
        engine.submit(crossing)
        engine.step()
        engine.relabel("v1")
        engine.relabel("v2")
        for _ in range(3):
            engine.step()
        engine.relabel("v2")
        engine.step()
    outcome = run_to_end(engine, [job("late", limit=2)])
    assert crossing.spans() == [
        {"version": "default", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 10},
    ]
    assert outcome["late"].job.spans() == [{"version": "v2", "start": 0, "end": 2}]
    assert outcome["crossing"].version == "v2"
