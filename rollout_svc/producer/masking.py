"""Tokens that are too old to be trained on: which they are, and their mask in a record that is encoded already.

Source of the rule: the staleness of a token at hand-over is `step` less the version that made it; beyond the bound its
`loss_mask` is 0, its id and logprob stay.

Invariants:

- Pure: what is masked depends on the spans and the step alone, so a batch that is sent again is the same batch.
- A record is never changed: one in which something is masked is a copy, any other is handed on as it is.
- A version nobody knows is too old for every bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rollout_svc.group import Group
from rollout_svc.sample import Sample
from rollout_svc.segment import VersionSpan

__all__ = ["encoded", "masked_tokens", "oldest_unmasked", "spent", "stale_everywhere", "stale_ranges", "with_masked"]

_MASK: Final = b'"loss_mask":['  # the first is the record's own, then those of earlier segments; then come anybody's


def oldest_unmasked(step: int, bound: int | None) -> int | None:
    """The oldest version whose tokens count at `step`; None where there is no bound."""
    return None if bound is None else step - bound


def stale_ranges(spans: Iterable[VersionSpan], oldest: int | None) -> list[tuple[int, int]]:
    """The ranges `[start, end)` of response tokens made under a version older than `oldest`, in order."""
    if oldest is None:
        return []
    return [(span.start, span.end) for span in spans if span.version is None or span.version < oldest]


def stale_everywhere(sample: Sample, oldest: int | None) -> list[list[tuple[int, int]]]:
    """The same of each conversation of a sample: its last one, then those before it, oldest first."""
    return [stale_ranges(spans, oldest) for spans in (sample.weight_versions, *sample.earlier_versions)]


def masked_tokens(sample: Sample, oldest: int | None) -> int:
    """How many of a sample's tokens that is."""
    return sum(end - start for start, end in stale_ranges(sample.all_versions, oldest))


def spent(group: Group, oldest: int | None) -> bool:
    """Whether a member has lost every token that the model made: it would teach nothing and weigh in its group."""
    if oldest is None:
        return False
    return any(
        (spans := sample.all_versions) and len(stale_ranges(spans, oldest)) == len(spans) for sample in group.samples
    )


def with_masked(record: bytes, *conversations: Sequence[tuple[int, int]]) -> bytes:
    """A sample's encoded record, with `loss_mask` 0 in these ranges: one digit and a comma a token, so no decoding.

    Args:
        record: the record.
        conversations: ranges of its own tokens, then of each of its `earlier_segments`.
    """
    if not any(conversations):
        return record
    copy, first = bytearray(record), 0
    for ranges in conversations:
        first = record.index(_MASK, first) + len(_MASK)
        for start, end in ranges:
            copy[first + 2 * start : first + 2 * end : 2] = b"0" * (end - start)
    return bytes(copy)


def encoded(group: Group, oldest: int | None) -> bytes:
    """A group's record in a batch, JSON, with the tokens of versions older than `oldest` masked."""
    if oldest is None:
        return group.encoded()
    return group.encoded(lambda sample, record: with_masked(record, *stale_everywhere(sample, oldest)))
