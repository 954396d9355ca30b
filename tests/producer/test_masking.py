"""Tokens beyond their bound: masked in what is sent, exactly those, and never in what is kept."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.group import Group
from rollout_svc.producer.masking import encoded, masked_tokens, oldest_unmasked, spent, stale_ranges, with_masked
from rollout_svc.sample import SampleStatus
from rollout_svc.segment import VersionSpan
from tests.support.groups import make_group, segment

Part = tuple[int, int | None]
"""How many tokens, and the version that made them; -1: the model did not."""

parts = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(-1, 6)), max_size=5)
groups = st.lists(parts, min_size=1, max_size=3)


def finished(members: list[list[Part]]) -> Group:
    """Make a group that is ready, each member of these parts."""
    group = make_group(size=len(members))
    group.start()
    for sample, made in zip(group.samples, members, strict=True):
        attempt = sample.hand_out()
        for count, version in made:
            sample.extend(attempt, segment([5] * count, version, by_model=version != -1))
        sample.meta["loss_mask"] = [7]  # a list of that name that is not the record's own
        sample.transition(attempt, SampleStatus.GENERATED)
        sample.transition(attempt, SampleStatus.JUDGING)
        sample.grade(attempt, 1.0, {"loss_mask": 3.0})
    group.finish(1.0)
    return group


@given(groups, st.integers(0, 12), st.none() | st.integers(0, 5))
def test_exactly_the_old_tokens_are_masked(members: list[list[Part]], step: int, bound: int | None) -> None:
    """`step - version` beyond the bound, or no version: mask 0; everything else in the record is as it was."""  # P32
    group = finished(members)
    kept = [sample.packed for sample in group.samples]
    oldest = oldest_unmasked(step, bound)
    before, after = (orjson.loads(encoded(group, which)) for which in (None, oldest))
    masked = 0
    for made, was, now in zip(members, before["samples"], after["samples"], strict=True):
        wanted = []
        for count, version in made:
            old = bound is not None and (version is None or step - version > bound)
            wanted += [int(version != -1 and not old)] * count
        assert now["loss_mask"] == wanted
        masked += sum(was["loss_mask"]) - sum(wanted)
        assert was | {"loss_mask": None} == now | {"loss_mask": None}
    assert sum(masked_tokens(sample, oldest) for sample in group.samples) == masked
    assert [sample.packed for sample in group.samples] == kept


@given(groups, st.integers(0, 12), st.none() | st.integers(0, 5))
def test_a_member_without_a_token_left_spends_its_group(
    members: list[list[Part]], step: int, bound: int | None
) -> None:
    """Only where the model made tokens and none of them counts; one that never had any is as it was judged."""  # P32
    group = finished(members)
    versions = [[version for _, version in made if version != -1] for made in members]
    wanted = bound is not None and any(
        made and all(version is None or step - version > bound for version in made) for made in versions
    )
    assert spent(group, oldest_unmasked(step, bound)) == wanted
    assert bound is None or (group.weakest < step - bound) == wanted


def test_a_record_in_which_nothing_is_masked_is_not_copied() -> None:
    """Without a bound, and within it, what is sent is what is kept."""
    record = b'{"loss_mask":[1,1]}'
    assert with_masked(record, []) is record
    assert with_masked(record, [(0, 1)]) == b'{"loss_mask":[0,1]}'
    assert stale_ranges([VersionSpan(3, 0, 2)], None) == stale_ranges([VersionSpan(3, 0, 2)], 3) == []
