"""The bench of the long tail: its trace, its engine, its ideal, and that a cell is the same each time."""

import asyncio
import hashlib
import itertools
from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import virtual
from bench.longtail import cases, run
from bench.longtail.__main__ import chosen, points
from bench.longtail.engine import TracedEngine
from bench.longtail.ideal import ideal
from bench.longtail.outcome import HandOver, Outcome, outcome
from bench.longtail.trace import RECORDED, TOKEN_S, Trace, make_trace, recorded
from rollout_svc.engines import Call


def test_every_case_is_a_point_of_four_by_four_by_five_by_three() -> None:
    """Spelled as they were asked for, none twice."""
    waves_and_bounds = itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    strategies = ("sync", "async", "async+partial", "async+partial+tail", "disaggregated+partial")
    names = itertools.product(("use", "rate", "long"), strategies, waves_and_bounds)
    assert set(cases.CASES) == {f"{measure}-{name}-w{w}-s{s}" for measure, name, (w, s) in names}
    assert len(cases.CASES) == 240
    assert {"use-sync-w1-s1", "rate-async+partial+tail-w4-s8"} < set(cases.CASES)


def test_waves_divide_the_slots() -> None:
    """A batch of 16 groups of 8 fills its slots once, twice, four times, eight times."""
    assert [cell.slots for cell in cases.CELLS if cell.staleness == 1][:4] == [128, 64, 32, 16]


# -- the trace -----------------------------------------------------------------------------------------------


def test_the_recorded_trace_is_the_one_that_was_recorded() -> None:
    """By its digest; nothing is above eight means, and the cut takes a twentieth of the mean."""
    trace = recorded()
    numbers = array("I", [count for group in trace.tokens for count in group])
    assert hashlib.sha256(numbers.tobytes()).hexdigest() == RECORDED
    assert (min(numbers), max(numbers)) == (1, 8 * 32)
    assert 0.8 * 32 < trace.mean_tokens < 1.05 * 32
    assert len(trace.longest_tenth) == len(trace.tokens) / 10


def test_the_longest_tenth_is_by_the_longest_sample() -> None:
    """A group is under way for as long as that."""
    trace = Trace(tuple((1,) * 7 + (number,) for number in (5, 30, 7, 8, 9, 10, 11, 12, 13, 14)))
    assert trace.longest_tenth == {1}
    assert trace.mean_longest_tokens == 11.9


# -- virtual time --------------------------------------------------------------------------------------------


def test_the_clock_jumps_and_whoever_waits_for_nothing_is_told() -> None:
    """A day passes at once; a wait for what nobody will ever set is an error."""

    async def a_day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    assert virtual.run(a_day()) == 86_400
    with pytest.raises(RuntimeError, match="nothing is ready and nothing is scheduled"):
        virtual.run(for_ever())


def test_nothing_may_have_a_clock_of_its_own() -> None:
    """An executor is refused."""

    async def thread() -> None:
        await asyncio.to_thread(int)

    with pytest.raises(RuntimeError, match="executor"):
        virtual.run(thread())


# -- the engine ----------------------------------------------------------------------------------------------


def _ask(rid: str, made: int, member: int = 0) -> bytes:
    params = {"sampling_seed": member, "max_new_tokens": 256}
    return orjson.dumps({"rid": rid, "input_ids": [0] + [7] * made, "sampling_params": params})


def test_what_is_cut_keeps_its_whole_tokens_and_goes_on_with_what_is_left() -> None:
    """Ten tokens, cut after four and a half: four are there, and the other six take as long as six."""

    async def story() -> None:
        engine, loop = TracedEngine(Trace(((10,) * 8,))), asyncio.get_running_loop()
        first = loop.create_task(engine.generate(_ask("a", 0)))
        await asyncio.sleep(4.5 * TOKEN_S)
        engine.control(Call("POST", "/abort_request", b'{"abort_all":true}'))
        answer = orjson.loads((await first).body)
        assert (answer["output_ids"], answer["meta_info"]["finish_reason"]) == ([7] * 4, {"type": "abort"})
        start = loop.time()
        answer = orjson.loads((await engine.generate(_ask("b", 4))).body)
        assert (len(answer["output_ids"]), answer["meta_info"]["finish_reason"]) == (6, {"type": "stop"})
        assert loop.time() - start == pytest.approx(6 * TOKEN_S)
        assert engine.busy_s() == pytest.approx(10.5 * TOKEN_S)
        assert engine.most == 1

    virtual.run(story())


# -- what is allowed -----------------------------------------------------------------------------------------


def test_equal_durations_fill_every_slot() -> None:
    """Where no answer is longer than another, two batches out keep every slot busy while the trainer trains."""
    found = ideal(Trace(tuple((8,) * 8 for _ in range(64))), slots=16, batch=2, staleness=2, train_s=0.5)
    assert found.use == pytest.approx(1.0)
    assert found.long == found.kept == 1.0


def test_a_window_of_one_batch_waits_for_its_longest() -> None:
    """Under staleness 0 each batch is on its own: seven of eight samples take a quarter of the time."""
    found = ideal(Trace(tuple((4,) * 7 + (16,) for _ in range(64))), slots=16, batch=2, staleness=0, train_s=0.0)
    assert found.use == pytest.approx((7 * 4 + 16) / (8 * 16))
    assert found.long == 1.0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), waves=st.sampled_from((1, 2, 4)))
def test_more_room_is_never_used_worse(seed: int, waves: int) -> None:
    """A wider bound allows more, nothing allows more than all, and nothing is lost where nothing can expire."""
    trace = make_trace(seed, prompts=400)
    narrow, wide = (ideal(trace, 64 // waves, 8, staleness, 1.0) for staleness in (1, 16))
    assert narrow.use <= wide.use + 0.02
    assert 0 < narrow.use <= 1.0 + 1e-9
    assert 0 < wide.use <= 1.0 + 1e-9
    assert wide.long == pytest.approx(1.0)
    assert wide.kept == pytest.approx(1.0)


def test_figures_are_of_the_window_and_shares_of_everything() -> None:
    """Six batches of a second each at half use; of twenty prompts ten were trained, both long ones among them."""
    trace = Trace(tuple((1,) * 7 + (30 if prompt < 2 else 2,) for prompt in range(20)))
    moments = [HandOver(float(second), 4.0 * second) for second in range(1, 10)]
    found = outcome(trace, 8, moments, range(10), warm=2, dry_at_s=8.5, busy_s=100.0)
    assert (found.use, found.rate, found.long, found.batches) == (0.5, 1.0, 2.0, 6)
    with pytest.raises(RuntimeError, match="5 batches"):
        outcome(trace, 8, moments, range(10), warm=2, dry_at_s=6.5, busy_s=100.0)


# -- a cell --------------------------------------------------------------------------------------------------


def _cell(strategy: str, waves: int, staleness: int) -> cases.Cell:
    found = [cell for cell in cases.CELLS if (cell.waves, cell.staleness) == (waves, staleness)]
    return next(cell for cell in found if cell.strategy.name == strategy)


def test_a_cell_is_the_same_each_time_and_loses_nothing() -> None:
    """Played twice, to the last digit; every prompt is trained once, where nothing is old enough to expire."""
    cell, trace = _cell("disaggregated+partial", 8, 4), make_trace(5, prompts=320)
    first, again = run.run_cell(cell, trace), run.run_cell(cell, trace)
    assert first == again
    assert first.long == 1.0


def test_what_is_cut_by_updates_goes_on_before_what_waits() -> None:
    """The service comes within a twentieth of a scheduler that is never cut: in use, in rate, in what is lost."""
    cell, trace = _cell("disaggregated+partial", 8, 1), make_trace(1, prompts=480)
    found = run.run_cell(cell, trace)
    allowed = ideal(trace, cell.slots, cases.BATCH, cell.staleness, run.train_s(trace, cell))
    assert found.use >= 0.95 * allowed.use
    assert found.rate >= 0.95 * allowed.rate
    assert found.kept >= 0.95 * allowed.kept


def test_a_window_in_place_of_a_bound_on_age_loses_nothing() -> None:
    """`tasks[].max_groups` of S + 1 batches under a wide `max_staleness`: every prompt is trained, at no lower rate."""
    cell, trace = _cell("disaggregated+partial", 4, 1), make_trace(1, prompts=400)
    windowed = replace(cell, strategy=replace(cell.strategy, ageless=True))
    bound, found = run.run_cell(cell, trace), run.run_cell(windowed, trace)
    allowed = ideal(trace, cell.slots, cases.BATCH, 1, run.train_s(trace, cell), expiring=False)
    assert bound.long < 0.5
    assert found.long == allowed.long == 1.0
    assert found.use >= 0.95 * allowed.use
    assert found.rate >= bound.rate


def test_the_tail_batch_trains_every_prompt() -> None:
    """Also those that expire without it: a slot for each sample of a batch, and one step of staleness."""
    trace = make_trace(3, prompts=320)
    without, found = (run.run_cell(_cell(name, 1, 1), trace) for name in ("async+partial", "async+partial+tail"))
    assert without.long < 0.9
    assert found.long == pytest.approx(1.0, abs=0.01)


def test_a_partial_that_is_made_again_costs_what_it_had() -> None:
    """`async` keeps less of what it makes than `async+partial`, and nothing that is made is lost by `sync`."""
    trace = make_trace(3, prompts=240)
    names = ("async", "async+partial", "sync")
    redone, partial, waited = (run.run_cell(_cell(name, 4, 2), trace).kept for name in names)
    assert redone < partial <= waited == pytest.approx(1.0)


def test_a_report_has_the_points_and_their_bounds() -> None:
    """Of the last strategy use is bound by what is allowed, of the tail batch the share of long prompts is."""
    cells = [_cell(strategy.name, 1, 1) for strategy in cases.STRATEGIES]
    found = {cell: Outcome(use=0.6, rate=0.02, long=1.004, kept=1.0, batches=40) for cell in cells}
    made = points(cells, found, {cells[-1]: Outcome(use=0.625, rate=0.02, long=1.0, kept=1.0, batches=40)})
    assert len(made) == 15
    assert {case for case, point in made.items() if point.bound is not None} == {
        "use-disaggregated+partial-w1-s1",
        "long-async+partial+tail-w1-s1",
    }
    assert made["use-disaggregated+partial-w1-s1"].ratio == pytest.approx(0.96)
    assert made["long-async+partial+tail-w1-s1"].ratio == pytest.approx(0.996)
    assert made["rate-async-w1-s1"].ratio == 1.0
    assert chosen(["rate-async-w2-s4"]) == [_cell("sync", 2, 4), _cell("async", 2, 4)]
    assert chosen(["use-async-w2-s4"]) == [_cell("async", 2, 4)]
    assert len(chosen(None)) == 80
