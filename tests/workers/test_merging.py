"""Several engines' answers are one answer only where that is true."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import EngineInfo, EngineProfile
from rollout_svc.errors import WorkerFailure
from rollout_svc.workers.merging import INCOMPLETE, merged_failure, merged_info, merged_profile, total

T = TypeVar("T")
CAPABILITIES = ("abort", "abort_all", "count", "disk", "flush", "set_version", "weight_version", "experts")
LABELS = st.sampled_from([None, "default", "0", "3", "-1", "x"])
SETS = st.sets(st.sampled_from(CAPABILITIES)).map(lambda chosen: tuple(sorted(chosen)))
BOUNDS = st.none() | st.integers(1, 9)
KINDS = st.sampled_from(["connection", "control_timeout", "http_500", "wrong_dialect", "unauthorized", "unfit"])
FAILURES = st.builds(
    lambda kind, hard, accepted: WorkerFailure(kind, "said so", hard=hard, accepted=accepted),
    KINDS,
    st.booleans(),
    st.booleans(),
)
PROFILE = EngineProfile("sglang", "0.5", CAPABILITIES, "raw", "m", "t", 10, 100, 8, "0")


def by_url(values: list[T]) -> dict[str, T]:
    """One engine each."""
    return {f"http://e{index}": value for index, value in enumerate(values)}


@given(st.lists(st.none() | st.integers(0, 99)))
def test_a_sum_is_known_only_where_every_count_is(counts: list[int | None]) -> None:
    """One engine that cannot count makes the worker's count unknown."""  # P9
    if None in counts:
        assert total(counts) is None
    else:
        assert total(counts) == sum(count or 0 for count in counts)


@given(st.lists(LABELS, min_size=1, max_size=5))
def test_labels_are_one_label_only_where_they_are_the_same(labels: list[str | None]) -> None:
    """Engines that differ have no version together, and every one of them is named with what it said."""  # P24
    info = merged_info(by_url([EngineInfo(label) for label in labels]))
    numbers = {int(label) for label in labels if label is not None and label.lstrip("-").isdigit()}
    assert info.versions == numbers
    if len(set(labels)) == 1:
        assert (info.weight_label, info.differing) == (labels[0], ())
    else:
        assert info.weight_version is None
        assert dict(info.differing) == by_url(labels)
        assert all(f"{url} reports {label}" in str(info) for url, label in by_url(labels).items())


@given(st.lists(st.tuples(SETS, BOUNDS, BOUNDS), min_size=1, max_size=4))
def test_it_can_what_each_can(each: list[tuple[tuple[str, ...], int | None, int | None]]) -> None:
    """Capabilities are those of all, less what a router drops; bounds are the smallest, unknown where one is."""
    profiles = [replace(PROFILE, capabilities=can, context=c, max_running=r) for can, c, r in each]
    merged = merged_profile(by_url(profiles))
    assert set(merged.capabilities) == set.intersection(*(set(can) for can, _, _ in each)) - {"experts"}
    contexts, running = [c for _, c, _ in each], [r for _, _, r in each]
    assert merged.context == (None if None in contexts else min(c for c in contexts if c is not None))
    assert merged.max_running == (None if None in running else min(r for r in running if r is not None))


@pytest.mark.parametrize(
    ("name", "value"), [("model", "other"), ("tokenizer", "x/u"), ("vocab_size", 11), ("logprobs", "processed")]
)
def test_what_samples_share_has_to_be_the_same(name: str, value: object) -> None:
    """P35: engines that disagree are refused, each named with what it has."""
    other = replace(PROFILE, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(WorkerFailure) as raised:
        merged_profile(by_url([PROFILE, other]))
    assert raised.value.kind == "unfit"
    said = f"disagree on {name}: http://e0 has {getattr(PROFILE, name)}, http://e1 has {value}"
    assert said in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [("tokenizer", None), ("tokenizer", "/elsewhere/t"), ("model", "/there/m")])
def test_what_may_be_the_same_is_not_held_against_it(name: str, value: object) -> None:
    """Machines keep the same files in different places, and not every engine says what it has."""
    other = replace(PROFILE, **{name: value})  # type: ignore[arg-type]
    assert merged_profile(by_url([PROFILE, other])).model == "m"


def test_a_model_may_have_another_name_where_the_weights_are_others() -> None:
    """An update from disk renames what an engine serves: one that was restarted since has still the old name."""
    updated = replace(PROFILE, model="/weights/3", weight_label="3")
    merged = merged_profile(by_url([updated, PROFILE]))
    assert merged.weight_label is None


def test_what_is_odd_about_one_engine_is_told() -> None:
    """Warnings name their engine; versions that differ are a warning, not an error."""
    other = replace(PROFILE, engine_version="0.6", warnings=("slow",))
    merged = merged_profile(by_url([PROFILE, other]))
    assert merged.engine_version == "0.5, 0.6"
    assert merged.warnings == ("http://e1: slow", "the engines behind it have different versions: 0.5, 0.6")


@given(st.lists(FAILURES, min_size=1, max_size=4), st.integers(0, 2))
def test_a_failure_of_some_names_each(failures: list[WorkerFailure], well: int) -> None:
    """Every engine that failed is named; the kind says whether waiting helps, and whether any engine answered."""
    merged = merged_failure(by_url(failures), len(failures) + well)
    kinds = [failure.kind for failure in failures]
    for url, failure in by_url(failures).items():
        said = failure.message if failure.kind == merged.kind else failure  # a kind is not said twice
        assert f"{url}: {said}" in str(merged)
    if final := [kind for kind in kinds if kind in ("unauthorized", "unfit")]:
        assert merged.kind == final[0]
    elif set(kinds) == {"wrong_dialect"}:
        assert merged.kind == "wrong_dialect"
    elif well:
        assert merged.kind == INCOMPLETE
    else:
        assert merged.kind == next(kind for kind in kinds if kind != "wrong_dialect")
    assert merged.accepted == all(failure.accepted for failure in failures)
    assert merged.hard == any(failure.hard for failure in failures)
