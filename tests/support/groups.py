"""Groups, samples and segments made for tests, and a recount of the ledger over the live objects."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rollout_svc.gate import Lane
from rollout_svc.group import Group
from rollout_svc.ledger import ACCOUNTS, Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.segment import Segment, VersionSpan

__all__ = ["completed", "make_group", "make_prompt", "make_sample", "recount", "run_to", "segment", "state_of"]


def make_prompt(**fields: Any) -> Prompt:
    """Make a prompt of three tokens."""
    return Prompt(**{"prompt_id": "p", "task": "t", "input_ids": [1, 2, 3], **fields})


def make_group(ledger: Ledger | None = None, size: int = 2, group_id: str = "g", lane: Lane = "train") -> Group:
    """Admit a group."""
    return Group(group_id=group_id, prompt=make_prompt(), size=size, lane=lane, ledger=ledger or Ledger())


def make_sample(ledger: Ledger) -> Sample:
    """Admit a group of one and return its sample."""
    return make_group(ledger, size=1).samples[0]


def segment(
    ids: Sequence[int],
    version: int | None = 0,
    *,
    turn: int = 0,
    by_model: bool = True,
    logprob: float = -1.0,
    confirmed: bool = True,
) -> Segment:
    """Make a segment of one version; one that is not the model's has no version and no logprob."""
    if not by_model:
        return Segment(list(ids), [0.0] * len(ids), (), by_model=False, turn=turn)
    spans = (VersionSpan(version, 0, len(ids), confirmed),) if ids else ()
    return Segment(list(ids), [logprob] * len(ids), spans, turn=turn)


def run_to(sample: Sample, status: SampleStatus, reward: float = 1.0) -> int:
    """Bring a fresh sample along the straight way, with two tokens; returns its attempt."""
    attempt = sample.hand_out()
    sample.extend(attempt, segment([7, 8]))
    for step in (SampleStatus.GENERATED, SampleStatus.JUDGING):
        if sample.status is not status:
            sample.transition(attempt, step)
    if status is SampleStatus.COMPLETED:
        sample.grade(attempt, reward, {})
    assert sample.status is status
    return attempt


def completed(ledger: Ledger, group_id: str, size: int = 1, version: int = 0) -> Group:
    """Make a group that is ready, its tokens made under one version."""
    group = make_group(ledger, size=size, group_id=group_id)
    group.start()
    for sample in group.samples:
        attempt = sample.hand_out()
        sample.extend(attempt, segment([7], version))
        sample.transition(attempt, SampleStatus.GENERATED)
        sample.transition(attempt, SampleStatus.JUDGING)
        sample.grade(attempt, 1.0, {})
    group.finish(1.0)
    return group


def state_of(thing: Sample | Group) -> dict[str, Any]:
    """Everything a sample or group holds, as values, its ledger and its members included."""
    fields = {name: getattr(thing, name) for name in thing.__slots__ if name not in {"_ledger", "samples", "prompt"}}
    values = {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
    values["ledger"] = thing._ledger.as_json()
    if isinstance(thing, Group):
        values["samples"] = [state_of(sample) for sample in thing.samples]
    return values


def recount(groups: Iterable[Group]) -> dict[str, dict[str, int]]:
    """Count groups and samples by account from the objects alone, in the ledger's own form."""
    groups = list(groups)
    by_group = Counter(group.account for group in groups)
    by_sample = Counter(sample.account for group in groups for sample in group.samples)
    return {
        unit: {"admitted": counts.total()} | {name: counts[name] for name in ACCOUNTS}
        for unit, counts in (("groups", by_group), ("samples", by_sample))
    }
