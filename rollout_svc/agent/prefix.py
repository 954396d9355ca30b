"""The ids that a conversation has come to, as the JSON an engine is sent: each written once, however many turns follow.

A turn sends all ids of the turns before it. Put together anew from lists, and written anew, they would cost a long
conversation more than its engine call does otherwise.

Invariants:

- What is written is what the sample has: the prompt, then its segments, those of the turn that is under way last.
- Only turns that are whole are kept: they change no more. Another prompt, or other segments, and all is written again.
"""

from __future__ import annotations

from rollout_svc.engines.calls import WrittenIds
from rollout_svc.sample import Sample
from rollout_svc.segment import Segment

__all__ = ["Prefix"]


class Prefix:
    """What was written of one sample's conversation so far."""

    __slots__ = ("_kept", "_known", "_last", "_prompt")

    def __init__(self) -> None:
        self._prompt: list[int] | None = None
        self._known = 0  # segments of the sample that are in `_kept`
        self._last: Segment | None = None
        self._kept = WrittenIds(b"", 0)

    def __repr__(self) -> str:
        return f"<Prefix {self._kept.length} ids of {self._known} segments>"

    def of(self, sample: Sample) -> WrittenIds:
        """Write the prompt and all tokens since, those of the turn under way included."""
        self._catch_up(sample)
        rest = sample.segments[self._known :]
        return self._kept.plus(*(part.ids for part in sorted(rest, key=lambda part: part.by_model)))

    def length(self, sample: Sample) -> int:
        """How many ids that would be."""
        self._catch_up(sample)
        return self._kept.length + sum(len(segment.ids) for segment in sample.segments[self._known :])

    def _catch_up(self, sample: Sample) -> None:
        segments = sample.segments
        same = self._known <= len(segments) and (not self._known or segments[self._known - 1] is self._last)
        if self._prompt is not sample.prompt_ids or not same:
            self._prompt, self._known, self._last = sample.prompt_ids, 0, None
            self._kept = WrittenIds.of(sample.prompt_ids)
        whole = []
        while self._known < len(segments) and segments[self._known].turn < sample.turn:
            self._last = segments[self._known]
            whole.append(self._last.ids)
            self._known += 1
        self._kept = self._kept.plus(*whole)
