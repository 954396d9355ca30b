"""A sample that was several conversations: each token of each is as old as it is, and leaves in every kind of batch."""

from typing import Any

import orjson

from rollout_svc.batch import Batch
from rollout_svc.batch_figures import _describe
from rollout_svc.buffer.journal.records import decode_sample, encode_sample, state_json
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.packing.batch import head, pack, rows
from rollout_svc.packing.reading import read_batch
from rollout_svc.producer.masking import encoded, masked_tokens, spent
from rollout_svc.producer.staleness import doomed, refusal
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.segment import VersionSpan
from tests.support.groups import make_group, make_sample, segment

S = SampleStatus


def spoken_twice(sample: Sample, first: int = 0, second: int = 4) -> int:
    """Make two tokens under one version, begin again with a prompt of its own, make three under another."""
    attempt = sample.hand_out()
    sample.extend(attempt, segment([7, 8], first))
    sample.turn = 1
    sample.begin_again(attempt, [1, 2, 3, 4, 5], 'history_rewritten: "loss_mask":[1')
    sample.extend(attempt, segment([9, 9, 9], second, turn=1))
    sample.meta = {"loss_mask": [5], "earlier_segments": [6], "response": 1}
    sample.finish_reason, sample.response = "stop", '"loss_mask":[1,1],"response":'
    return attempt


def judged(sample: Sample, attempt: int) -> None:
    """Have it judged."""
    for status in (S.GENERATED, S.JUDGING):
        sample.transition(attempt, status)
    sample.grade(attempt, 1.0, {})


def finished() -> Group:
    """Make a group whose first member spoke twice, and whose second spoke once."""
    group = make_group(Ledger())
    group.start()
    one, other = group.samples
    judged(one, spoken_twice(one))
    attempt = other.hand_out()
    other.extend(attempt, segment([6], 4))
    judged(other, attempt)
    group.finish(0.0)
    return group


def batch_of(group: Group, oldest: int | None) -> Batch:
    """Lend it."""
    return Batch(batch_id="b", step=4, groups=(group,), metrics={}, oldest=oldest)


def test_a_token_of_an_earlier_conversation_is_as_old_as_it_is() -> None:
    """The bound on groups counts it: a group is not fresh because its agent rewrote its history."""  # P32
    group = finished()
    assert group.versions() == {0, 4}
    assert (refusal(group, 4, 3), refusal(group, 4, 4)) == ("stale", None)
    figures = _describe([group], 4, None, ())
    assert (figures["staleness"], figures["mixed_versions"]) == ({"4": 1}, 1)


def test_it_dooms_a_group_that_still_runs() -> None:
    """What can never be handed over is known while its agent goes on."""  # P32
    group = make_group(Ledger(), size=1)
    group.start()
    spoken_twice(group.samples[0])
    assert (doomed(group, 4, 3), doomed(group, 4, 4)) == ("stale", None)


def test_a_sample_with_turns_of_one_version_is_not_mixed() -> None:
    """Tokens of a tool between two turns are no change of weights."""
    group = make_group(Ledger(), size=1)
    group.start()
    sample = group.samples[0]
    attempt = sample.hand_out()
    for part in (segment([7], 2), segment([5], by_model=False), segment([8], 2)):
        sample.extend(attempt, part)
    judged(sample, attempt)
    assert _describe([group], 2, None, ())["mixed_versions"] == 0


def test_an_earlier_token_beyond_its_bound_is_masked() -> None:
    """In the segment it belongs to, and nowhere else: neither what it says nor what is anybody's own changes."""  # P32
    group = finished()
    one = group.samples[0]
    kept, sent = one.packed, orjson.loads(encoded(group, 2))["samples"][0]
    assert (sent["loss_mask"], sent["earlier_segments"][0]["loss_mask"]) == ([1, 1, 1], [0, 0])
    was = orjson.loads(kept or b"")
    was["earlier_segments"][0]["loss_mask"] = [0, 0]
    assert (sent, one.packed, masked_tokens(one, 2)) == (was, kept, 2)
    late = orjson.loads(encoded(group, 5))["samples"][0]
    assert (late["loss_mask"], late["earlier_segments"][0]["loss_mask"]) == ([0, 0, 0], [0, 0])
    assert (spent(group, 2), spent(group, 5)) == (False, True)


def test_tensors_have_each_conversation_as_it_was() -> None:
    """Its row begins as it began, not as another of its group; those before it are in the head, masked alike."""  # P32
    batch = batch_of(finished(), 2)
    read = read_batch(b"".join(pack(rows(batch), head(batch))))
    ids = read["tensors"]["input_ids"].tolist()
    assert ids == [[1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 6, 0, 0, 0, 0]]
    one, other = read["samples"]
    assert [(part["response_ids"], part["loss_mask"]) for part in one["earlier_segments"]] == [([7, 8], [0, 0])]
    assert "earlier_segments" not in other


def recalled(sample: Sample) -> Sample:
    """Have it be noted, read, and be another life's."""
    state = sample.state()
    fresh = make_sample(Ledger())
    fresh.recall(decode_sample(str(sample.status), *encode_sample(state, state_json(state))).handed_back())
    return fresh


def test_it_is_the_same_in_another_life() -> None:
    """A completed one keeps what it began with, and the age of every token."""  # P31 P32
    one = finished().samples[0]
    again = recalled(one)
    told: list[Any] = [again.packed, again.prompt_ids, again.weight_versions, again.earlier_versions]
    assert told == [one.packed, [1, 2, 3, 4, 5], (VersionSpan(4, 0, 3),), ((VersionSpan(0, 0, 2),),)]
    assert again.state()._replace(attempt=0) == one.state()._replace(attempt=0)


def test_an_unfinished_one_is_the_same_in_another_life() -> None:
    """What it began with, what was said before, and how old that is."""  # P31 P32
    sample = make_sample(Ledger())
    attempt = spoken_twice(sample)
    sample.transition(attempt, S.GENERATED)
    again = recalled(sample)
    assert (again.prompt_ids, again.earlier, again.status) == (sample.prompt_ids, sample.earlier, S.ABORTED)
    assert again.all_versions == sample.all_versions
    assert recalled(sample).hand_out() > attempt
    judged_again = recalled(sample)
    judged_again.grade(judged_again.hand_out(), 1.0, {})
    assert orjson.loads(judged_again.packed or b"")["earlier_segments"] == sample.earlier


def test_what_is_made_by_later_weights_is_found_in_each_conversation() -> None:
    """A step that is restored knows no token of later weights, in no segment of its samples."""  # P31
    sample = make_sample(Ledger())
    attempt = spoken_twice(sample, first=6, second=1)
    assert {span.version for span in sample.state().all_versions()} == {1, 6}
    judged(sample, attempt)
    assert {span.version for span in sample.state().all_versions()} == {1, 6}
