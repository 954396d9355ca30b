"""What a filter sees: everything of a finished group, nothing it could change, and nothing once it has answered."""

from __future__ import annotations

import gc
import weakref
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from rollout_svc.filtering import GroupView, SampleView, view_of
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.sample import SampleStatus
from tests.support.groups import make_prompt, run_to, state_of


def a_group() -> Group:
    prompt = make_prompt(content="what?", ground_truth={"deep": [1]}, meta={"level": {"n": 1}})
    group = Group(group_id="g", prompt=prompt, size=2, lane="train", ledger=Ledger())
    group.start()
    for number, sample in enumerate(group.samples):
        sample.response = f"answer {number}"
        run_to(sample, SampleStatus.COMPLETED, reward=float(number))
    return group


def test_a_view_shows_what_was_judged() -> None:
    """Rewards, statuses, lengths and versions are at hand; texts, tokens and the prompt are there for the asking."""
    view = view_of(a_group())
    assert (view.group_id, view.task, view.prompt_id, view.rewards) == ("g", "t", "p", (0.0, 1.0))
    assert (view.prompt, view.prompt_ids, view.ground_truth) == ("what?", [1, 2, 3], {"deep": [1]})
    assert view.meta == {"level": {"n": 1}}
    one = view.samples[1]
    assert (one.sample_id, one.index, one.status, one.reward) == ("g.1", 1, "COMPLETED", 1.0)
    assert (one.response, one.response_ids, one.loss_mask, one.response_length) == ("answer 1", [7, 8], [1, 1], 2)
    assert (one.group_id, one.task, one.prompt, one.prompt_ids) == ("g", "t", "what?", [1, 2, 3])
    assert one.ground_truth == {"deep": [1]}
    assert (one.reward_parts, one.meta, one.weight_versions[0].version) == ({}, {"level": {"n": 1}}, 0)


def spoil(view: GroupView) -> None:
    """Change whatever can be changed."""
    view.ground_truth["deep"].append(2)
    view.meta["level"]["n"] = 2
    view.prompt_ids.append(4)
    for sample in view.samples:
        sample.ground_truth["deep"].append(3)
        sample.meta["level"]["n"] = 2
        sample.response_ids.append(9)
        sample.reward_parts["mine"] = 1.0


def test_a_filter_changes_nothing() -> None:
    """What a filter does to a view happens to a copy: the group is as it was."""
    group = a_group()
    before, record = state_of(group), group.encoded()
    view = view_of(group)
    spoil(view)
    assert (state_of(group), group.encoded()) == (before, record)
    assert (view.ground_truth, view.samples[0].response_ids) == ({"deep": [1]}, [7, 8])
    for thing in (view, view.samples[0]):
        for field in fields(thing):
            with pytest.raises(FrozenInstanceError):
                setattr(thing, field.name, None)


@pytest.mark.parametrize("name", ["prompt", "prompt_ids", "ground_truth", "meta"])
def test_a_closed_view_leads_nowhere(name: str) -> None:
    """After the call a filter that kept its view keeps numbers, and is told so where it wants more."""  # P28
    view = view_of(a_group())
    view.close()
    view.close()
    with pytest.raises(RuntimeError, match="until it has answered"):
        getattr(view, name)
    with pytest.raises(RuntimeError, match="until it has answered"):
        _ = view.samples[0].response
    assert view.rewards == (0.0, 1.0)


def test_a_kept_view_keeps_no_payload_alive() -> None:
    """What was filtered is gone from memory although somebody holds the view of it."""  # P28

    class Heavy(dict[str, Any]):
        """Something that can be looked after."""

    group = a_group()
    heavy = Heavy()
    group.prompt.meta["heavy"] = heavy
    alive = weakref.ref(heavy)
    kept: list[GroupView | SampleView] = [view := view_of(group), view.samples[0]]
    view.close()
    del group, heavy, view
    gc.collect()
    assert alive() is None
    assert kept
