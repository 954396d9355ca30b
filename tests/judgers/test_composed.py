"""`composed` and `router`: judgers made of others, each run where it belongs, and failing by name."""

import asyncio
import math
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_judgers.composed import weighted
from rollout_svc.config import JudgerConfig
from rollout_svc.errors import ConfigError, Interrupted, SampleFailure
from rollout_svc.gate import LANES
from rollout_svc.judging import ProcessRunner, Reward
from rollout_svc.judging.making import make_desk
from rollout_svc.judging.processes import JudgePool
from tests.support.composed import Awaited
from tests.support.court import Court, a_sample, now
from tests.support.virtual import soon, virtual

COMPOSED = "rollout_judgers.composed:Composed"
ROUTER = "rollout_judgers.router:Router"
AWAITED = "tests.support.composed:Awaited"
WHERE = "tests.support.composed:Where"
HERE = "tests.support.composed:Here"
NEVER = "tests.support.composed:Never"


def court_of(settings: dict[str, Any], processes: ProcessRunner | None = None) -> Court:
    """Make the court of a judger from its settings, as a task would."""
    court = Court(Awaited(), processes=processes)
    court.desk = make_desk(JudgerConfig.model_validate(settings), "tasks.0.judger")
    court.judging.add_desk(court.desk)
    return court


def composed(**parts: dict[str, Any]) -> dict[str, Any]:
    """Make the settings of a composed judger."""
    return {"path": COMPOSED, "timeout_s": 7.0, "parts": parts}


def awaited(**options: Any) -> dict[str, Any]:
    """Make the settings of an async part."""
    return {"path": AWAITED, **options}


def part_of(court: Court, name: str) -> Any:
    """Return the judger of a part."""
    return court.desk.parts[name]._judger


# -- composed ------------------------------------------------------------------------------------------------

numbers = st.floats(-1e6, 1e6)


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(numbers, numbers), min_size=1))
def test_a_weighted_sum_is_one(parts: dict[str, tuple[float, float]]) -> None:
    """The value is the sum of weight times reward, in any order; the parts are the rewards as they were."""
    rewards = {name: Reward(value, {"x": value}) for name, (value, _) in parts.items()}
    weights = {name: weight for name, (_, weight) in parts.items()}
    made = weighted(rewards, weights)
    assert made.value == math.fsum(value * weight for value, weight in parts.values())
    assert weighted(dict(reversed(rewards.items())), weights).value == made.value
    values = {name: value for name, (value, _) in parts.items()}
    assert made.parts == values | {f"{name}.x": value for name, value in values.items()}


async def test_each_part_runs_where_it_belongs() -> None:
    """A synchronous part runs in a process, also inside a composed one; instant and async ones in the loop."""  # P21
    runner = JudgePool(1)
    inner = composed(sync={"path": WHERE}, here={"path": HERE, "weight": 2})
    try:
        court = court_of(composed(inner=inner, other=awaited(weight=-1)), runner)
        async with asyncio.timeout(30):
            [reward] = await court.ask()
            hung = court_of(composed(good=awaited(), hung={"path": NEVER, "timeout_s": 0.5}), runner)
            with pytest.raises(SampleFailure, match=r"judge_timeout: .*parts\.hung: .* no verdict in 0\.5 s"):
                await hung.ask()
    finally:
        await runner.close()
    assert reward.value == 0.5 + 2 * 0.25 - 1
    assert set(reward.parts) == {"inner", "inner.sync", "inner.sync.pid", "inner.here", "inner.here.pid", "other"}
    assert reward.parts["inner.here.pid"] == os.getpid()
    assert reward.parts["inner.sync.pid"] != os.getpid()
    assert court.empty()
    assert hung.empty()


@virtual
async def test_one_part_that_fails_fails_all_by_name() -> None:
    """The whole has the part's reason and name, at once; the others are ended, and nothing counts as 0."""  # P2
    court = court_of(composed(slow=awaited(seconds=5), bad=awaited(seconds=1, raises="odd")))
    with pytest.raises(SampleFailure, match=r"judge_error: rollout_judgers.*: parts\.bad: .*ValueError: odd"):
        await court.ask()
    assert now() == pytest.approx(1)
    await soon()
    assert part_of(court, "parts.slow").cancelled == 1
    assert court.empty()


@virtual
async def test_a_part_without_a_number_is_refused() -> None:
    """What no judger may give, no part may."""  # P2
    court = court_of(composed(bad=awaited(value="1")))
    with pytest.raises(SampleFailure, match=r"judge_invalid: .*parts\.bad"):
        await court.ask()


@virtual
async def test_parts_have_the_timeout_of_the_whole_and_queueing_is_not_counted() -> None:
    """Ten samples in line for a part of one place keep their timeout, each; one that hangs does not."""  # P21
    court = court_of(composed(a=awaited(seconds=5, concurrency=1)))
    assert await asyncio.gather(*(court.ask(number) for number in range(10))) == [[Reward(1.0, {"a": 1.0})]] * 10
    assert now() == pytest.approx(50)
    hung = court_of(composed(a=awaited(seconds=1e9)))
    with pytest.raises(SampleFailure, match="judge_timeout"):
        await hung.ask()
    assert now() == pytest.approx(57)
    assert court.empty()


@virtual
async def test_one_that_asks_others_and_never_answers_is_ended() -> None:
    """Its own time is bounded by its timeout; that of those it asks is not in it."""  # P21
    court = court_of({"path": "tests.support.composed:Forgetful", "timeout_s": 7.0, "seconds": 50})
    with pytest.raises(SampleFailure, match=r"judge_timeout: .*Forgetful.* no verdict in 7 s"):
        await asyncio.wait_for(court.ask(), 1000)
    assert now() == pytest.approx(57)
    await soon()
    assert court.empty()


@virtual
async def test_a_pause_ends_the_whole_with_its_parts() -> None:
    """It is one judge: counted once, ended at once, parts in line included, and repeated after the pause."""  # P8, P13
    court = court_of(composed(a=awaited(seconds=5, concurrency=1), b=awaited(seconds=5)))
    calls = [court.ask(number) for number in range(3)]
    await soon()
    assert court.judging.pending(LANES) == 3
    assert court.judging.interrupt(LANES, 10) == 3
    for call in calls:
        with pytest.raises(Interrupted):
            await call
    await soon(10)
    assert [part_of(court, f"parts.{name}").cancelled for name in "ab"] == [1, 3]
    assert (court.empty(), court.judging.clinging) == (True, ())
    assert all(desk.running == 0 for desk in court.desk.parts.values())
    assert now() == 0
    assert len(await court.ask()) == 1


@virtual
async def test_a_part_has_second_chances_of_its_own() -> None:
    """`on_failure: redo` of a part repeats that part, and not the others."""
    bad = awaited(raises="odd", on_failure="redo", redos=2)
    court = court_of(composed(good=awaited(), bad=bad))
    with pytest.raises(SampleFailure, match=r"parts\.bad"):
        await court.ask()
    assert [part_of(court, f"parts.{name}").asked for name in ("good", "bad")] == [1, 3]


@virtual
async def test_closing_closes_the_parts() -> None:
    """What the parts hold is given back with the whole."""
    court = court_of(composed(a=awaited(), b=composed(c=awaited())))
    await court.judging.close()
    assert part_of(court, "parts.a").closed == 1
    assert court.desk.parts["parts.b"].parts["parts.c"]._judger.closed == 1


# -- router --------------------------------------------------------------------------------------------------


def routed(**options: Any) -> Court:
    """Make the court of a router with two routes."""
    routes = {"t": awaited(value=1), "gsm8k": awaited(value=2)}
    return court_of({"path": ROUTER, "routes": routes, **options})


@pytest.mark.parametrize(
    ("options", "meta", "value"),
    [
        ({}, {}, 1.0),
        ({"key": "meta.source"}, {"source": "gsm8k"}, 2.0),
        ({"key": "meta.a.b"}, {"a": {"b": "t"}}, 1.0),
        ({"key": "meta.source", "default": awaited(value=3)}, {"source": "other"}, 3.0),
        ({"key": "meta.source", "default": awaited(value=3)}, {}, 3.0),
        ({"key": "meta.source"}, {"source": "other"}, "'other'"),
        ({"key": "meta.source"}, {}, "missing"),
        ({"key": "meta.source"}, {"source": None}, "None"),
    ],
)
def test_a_sample_goes_to_its_judger(options: dict[str, Any], meta: dict[str, Any], value: Any) -> None:
    """By task or by a value of its meta, else by default; without one it fails, typed, and is no 0."""  # P2

    @virtual
    async def run() -> None:
        court = routed(**options)
        sample = a_sample()
        sample.meta.update(meta)
        call = court.judging.judge(court.desk, "train", [sample])
        if isinstance(value, float):
            assert await call == [Reward(value)]
        else:
            with pytest.raises(SampleFailure, match=f"judge_error: .*no_route: .*{value}"):
                await call
        assert court.empty()

    run()


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (composed(), "parts"),
        ({"path": COMPOSED, "parts": []}, "parts"),
        (composed(a={}), "parts.a"),
        ({"path": COMPOSED, "parts": {"a": 1}}, "parts.a"),
        (composed(a=awaited(weight="1")), "parts.a.weight"),
        (composed(a=awaited(weight=math.nan)), "parts.a.weight"),
        (composed(a={"name": "no such"}), "parts.a.name"),
        (composed(a=awaited(timeout_s=0)), "parts.a.timeout_s"),
        (composed(a=awaited(odd=1)), "parts.a.odd"),
        (composed(a=composed(b=awaited(odd=1))), "parts.a.parts.b.odd"),
        (composed(a={"path": "tests.support.composed:Group"}), "parts.a"),
        ({"path": ROUTER, "routes": {}}, "routes"),
        ({"path": ROUTER, "routes": {"a": 1}}, "routes.a"),
        ({"path": ROUTER, "routes": {"a": awaited()}, "key": "meta."}, "key"),
        ({"path": ROUTER, "routes": {"a": awaited()}, "default": awaited(odd=1)}, "default.odd"),
        (awaited(partial="fail"), "partial"),
    ],
)
def test_a_setting_of_a_part_is_named_by_its_path(settings: dict[str, Any], path: str) -> None:
    """Whatever is wrong below a judger is told where the user wrote it, before anything starts."""  # P35
    with pytest.raises(ConfigError) as caught:
        court_of(settings)
    assert [problem.path for problem in caught.value.problems] == [f"tasks.0.judger.{path}"]


def test_every_part_that_is_wrong_is_told() -> None:
    """Two mistakes are two lines."""  # P35
    with pytest.raises(ConfigError) as caught:
        court_of(composed(a=awaited(odd=1), b=awaited(timeout_s=-1)))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"requests_per_minute": 0},
        {"on_failure": "zero"},
        {"redos": 0},
        {"partial": "judge_what_is_there"},
    ],
)
def test_limits_are_checked(settings: dict[str, Any]) -> None:
    """No rate of nothing, no other way to fail, and no group that is handed over in part."""  # P35
    with pytest.raises(ValueError, match=next(iter(settings))):
        JudgerConfig.model_validate({"name": "exact", **settings})
